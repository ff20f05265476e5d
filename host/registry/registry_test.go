package registry

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/holders"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func image(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "store.img")
	must(t, os.WriteFile(path, make([]byte, 4<<20), 0o600))
	return path
}

// claim claims a store until the test ends.
func claim(t *testing.T, s *Stores, path, owner string, readOnly bool) (*Store, error) {
	t.Helper()
	store, err := s.Find(path)
	must(t, err)
	t.Cleanup(store.Close)
	return store, store.Claim(owner, readOnly)
}

// refused checks that a store is in use by the named owner.
func refused(t *testing.T, s *Stores, path string, readOnly bool, by string) {
	t.Helper()
	store, err := claim(t, s, path, "the second", readOnly)
	store.Close()
	if inUse, ok := errors.AsType[*holders.InUseError](err); !ok || !strings.Contains(inUse.Error(), by) {
		t.Errorf("%s, read-only %v:\nwant it in use: %s\ngot  %v", path, readOnly, by, err)
	}
}

func loopDevice(t *testing.T, arguments ...string) string {
	t.Helper()
	out, err := exec.Command("losetup", append([]string{"--find", "--show"}, arguments...)...).CombinedOutput()
	if err != nil {
		t.Skipf("no loop device: losetup: %v: %s: run go test ./host/registry as root on a host whose kernel has loop devices", err, out)
	}
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("losetup", "--detach", device).Run() })
	return device
}

func TestStoreHasOneWriterByAnyName(t *testing.T) {
	s, path, dir := In(filepath.Join(t.TempDir(), "stores")), image(t), t.TempDir()
	symlink, hard := filepath.Join(dir, "by-id"), path+".hard"
	must(t, os.Symlink(path, symlink))
	must(t, os.Link(path, hard))
	store, err := claim(t, s, path, "sandbox one", false)
	must(t, err)
	for _, name := range []string{path, symlink, hard} {
		for _, readOnly := range []bool{false, true} {
			refused(t, s, name, readOnly, "for sandbox one, as "+path)
		}
	}
	store.Close()
	_, err = claim(t, s, hard, "sandbox two", false)
	must(t, err)
}

func TestStoreIsOneThroughABindMount(t *testing.T) {
	s, path, dir := In(filepath.Join(t.TempDir(), "stores")), image(t), t.TempDir()
	if err := unix.Mount(filepath.Dir(path), dir, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("bind mount: %v: run go test ./host/registry as root", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	_, err := claim(t, s, path, "sandbox one", false)
	must(t, err)
	refused(t, s, filepath.Join(dir, filepath.Base(path)), false, "for sandbox one, as "+path)
}

func TestReadersShareAStoreAndWritersDoNot(t *testing.T) {
	s, path := In(filepath.Join(t.TempDir(), "stores")), image(t)
	first, err := claim(t, s, path, "sandbox one", true)
	must(t, err)
	second, err := claim(t, s, path, "sandbox two", true)
	must(t, err)
	refused(t, s, path, false, "reads it for sandbox two, as "+path)
	second.Close()
	refused(t, s, path, false, "reads it for sandbox ")
	first.Close()
	_, err = claim(t, s, path, "sandbox three", false)
	must(t, err)
}

func TestLoopDeviceAndItsFileAreOneStore(t *testing.T) {
	path := image(t)
	device, other := loopDevice(t, path), loopDevice(t, path)
	link, node := filepath.Join(t.TempDir(), "by-id"), filepath.Join(t.TempDir(), "node")
	must(t, os.Symlink(device, link))
	var st unix.Stat_t
	must(t, unix.Stat(device, &st))
	must(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(st.Rdev)))
	names := []string{path, device, other, link, node}
	for _, taken := range names {
		s := In(filepath.Join(t.TempDir(), "stores"))
		store, err := claim(t, s, taken, "sandbox one", false)
		must(t, err)
		for _, name := range names {
			refused(t, s, name, false, "for sandbox one, as "+taken)
			refused(t, s, name, true, "for sandbox one, as "+taken)
		}
		store.Close()
	}
}

// partitioned returns a loop device with two partitions.
func partitioned(t *testing.T) string {
	t.Helper()
	device := loopDevice(t, "--partscan", image(t))
	for i, part := range []string{"p1", "p2"} {
		if out, err := exec.Command("addpart", device, strconv.Itoa(i+1), strconv.Itoa(2048*(i+1)), "2048").CombinedOutput(); err != nil {
			t.Skipf("addpart: %v: %s: apt-get install util-linux, and run go test ./host/registry as root", err, out)
		}
		if _, err := os.Stat(device + part); err == nil {
			continue
		}
		// No udev makes the partition's device node here.
		name := filepath.Base(device)
		text, err := os.ReadFile("/sys/block/" + name + "/" + name + part + "/dev")
		must(t, err)
		major, minor, _ := strings.Cut(strings.TrimSpace(string(text)), ":")
		must(t, exec.Command("mknod", device+part, "b", major, minor).Run())
		t.Cleanup(func() { os.Remove(device + part) })
	}
	return device
}

func TestPartitionExcludesItsDiskAndNoOtherPartition(t *testing.T) {
	device := partitioned(t)
	s := In(filepath.Join(t.TempDir(), "stores"))
	for _, pair := range []struct {
		first, second  string
		reads, refused bool // reads: the first claim is read-only
	}{
		{device + "p1", device, false, true}, {device, device + "p1", false, true}, {device + "p1", device + "p2", false, false},
		{device + "p1", device, true, true}, {device, device + "p1", true, true}, {device + "p1", device + "p2", true, false},
	} {
		store, err := claim(t, s, pair.first, "sandbox one", pair.reads)
		must(t, err)
		if pair.refused {
			refused(t, s, pair.second, false, "for sandbox one, as "+pair.first)
		} else if other, err := claim(t, s, pair.second, "sandbox two", false); err != nil {
			t.Errorf("%s beside %s: %v", pair.second, pair.first, err)
		} else {
			other.Close()
		}
		store.Close()
	}
	// Without lock files, as for another user, the kernel still excludes the writers of a disk and
	// of its partition.
	_, err := claim(t, s, device+"p1", "sandbox one", false)
	must(t, err)
	refused(t, In(filepath.Join(t.TempDir(), "others")), device, false, "in use")
}

func TestMountedDeviceIsRefusedWithWhere(t *testing.T) {
	path := image(t)
	if out, err := exec.Command("/usr/sbin/mkfs.ext4", "-q", "-F", path).CombinedOutput(); err != nil {
		t.Skipf("mkfs.ext4: %v: %s: apt-get install e2fsprogs, and run go test ./host/registry", err, out)
	}
	device, dir := loopDevice(t, path), t.TempDir()
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != nil {
		t.Skipf("mount: %v: run go test ./host/registry as root on a host whose kernel has ext4", err)
	}
	s := In(filepath.Join(t.TempDir(), "stores"))
	refused(t, s, device, false, "it is mounted on "+dir)
	must(t, unix.Unmount(dir, 0))
	_, err := claim(t, s, device, "sandbox one", false)
	must(t, err)
	if err := unix.Mount(device, dir, "ext4", 0, ""); !errors.Is(err, unix.EBUSY) {
		unix.Unmount(dir, 0)
		t.Errorf("mount of a store that a sandbox has:\nwant %v\ngot  %v", unix.EBUSY, err)
	}
}

// QEMU locks bytes of its images. Another user's QEMU has no lock file here.
func TestImageThatAnotherQEMUHasIsRefused(t *testing.T) {
	path := image(t)
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	must(t, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: 101, Len: 1}))
	refused(t, In(filepath.Join(t.TempDir(), "stores")), path, false, "in use")
}

func TestDiskThatIsOpenAlreadyIsLockedAsAStore(t *testing.T) {
	s, path := In(filepath.Join(t.TempDir(), "stores")), image(t)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	lock, err := s.Lock(f, "directvol rescue")
	must(t, err)
	refused(t, s, path, false, "for directvol rescue, as "+path)
	lock.Release()
	lock.Release()
	_, err = claim(t, s, path, "sandbox one", false)
	must(t, err)
	if _, err := s.Lock(f, "directvol rescue"); err == nil {
		t.Error("locked what a sandbox has")
	}
}

func TestFileThatIsNotAStoreIsRefused(t *testing.T) {
	s := In(filepath.Join(t.TempDir(), "stores"))
	fifo := filepath.Join(t.TempDir(), "fifo")
	must(t, unix.Mkfifo(fifo, 0o600))
	for _, path := range []string{fifo, "/dev/null", t.TempDir(), "/nonexistent"} {
		if _, err := s.Find(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s:\nwant it refused by its name\ngot  %v", path, err)
		}
	}
}

// Between fork and exec, a process started by another goroutine has a copy of each descriptor.
func TestStoreThatIsClosedIsLockedByNoCopyOfItsDescriptors(t *testing.T) {
	stores, path := In(filepath.Join(t.TempDir(), "stores")), image(t)
	reader, err := claim(t, stores, path, "a reader", true)
	must(t, err)
	other, err := claim(t, stores, path, "another reader", true) // keeps the lock file from being removed
	must(t, err)
	for _, file := range reader.lock.files {
		copied, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		must(t, err)
		defer unix.Close(copied)
	}
	reader.Close()
	other.Close()
	if _, err := claim(t, stores, path, "a writer", false); err != nil {
		t.Errorf("a store that nobody has any more: %v", err)
	}
}

// A QEMU that was killed has not unlocked its image.
func TestStoreThatIsClosedHasNoLockOfAQEMUThatHasEnded(t *testing.T) {
	stores, path := In(filepath.Join(t.TempDir(), "stores")), image(t)
	store, err := claim(t, stores, path, "sandbox one", false)
	must(t, err)
	copied, err := unix.FcntlInt(store.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(copied)
	must(t, unix.FcntlFlock(uintptr(copied), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: 100, Len: 2}))
	store.Close()
	if _, err := claim(t, stores, path, "sandbox two", false); err != nil {
		t.Errorf("a store that nobody has any more: %v", err)
	}
}

func TestDirectoryOfLocksIsItsUsersAlone(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Chmod(dir, 0o755))
	if _, err := claim(t, In(dir), image(t), "sandbox one", false); err == nil || !strings.Contains(err.Error(), "0700") {
		t.Errorf("a directory that others may enter:\nwant it refused\ngot  %v", err)
	}
}

func TestSizeComesFromTheDescriptor(t *testing.T) {
	s, path := In(filepath.Join(t.TempDir(), "stores")), image(t)
	device := loopDevice(t, path)
	store, err := claim(t, s, device, "sandbox one", false)
	must(t, err)
	must(t, os.Truncate(path, 8<<20))
	must(t, exec.Command("losetup", "--set-capacity", device).Run())
	must(t, os.Rename(path, path+".away"))
	if got, err := store.Bytes(); got != 8<<20 || err != nil {
		t.Errorf("bytes:\nwant %d\ngot  %d, %v", 8<<20, got, err)
	}
}

// While locks are taken and released concurrently, two callers must never have the store, and no
// lock file may be left.
func TestLocksThatComeAndGoKeepTheirRule(t *testing.T) {
	s, path := In(filepath.Join(t.TempDir(), "stores")), image(t)
	var owners, had atomic.Int32
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for range 500 {
				store, err := s.Find(path)
				if err != nil {
					t.Error(err)
					return
				}
				err = store.Claim("sandbox", false)
				if _, inUse := errors.AsType[*holders.InUseError](err); err != nil && !inUse {
					t.Error(err)
				}
				if err == nil {
					if there, err := hasName(store.lock.files[0]); !there || err != nil {
						t.Errorf("the lock file of its owner was removed, and locks nothing: %v", err)
					}
					if now := owners.Add(1); now != 1 {
						t.Errorf("%d have the store", now)
					}
					had.Add(1)
					owners.Add(-1)
				}
				store.Close()
			}
		})
	}
	callers.Wait()
	if left, err := os.ReadDir(s.dir); err != nil || len(left) != 0 {
		t.Errorf("lock files that are left: %v, %v", left, err)
	}
	if had.Load() < 100 {
		t.Errorf("claims that succeeded:\nwant many\ngot  %d of 2000", had.Load())
	}
}

// A refused caller has the lock file open that the first owner removes. When the caller releases
// it, another lock file has its name.
func TestRefusedClaimRemovesNoLaterLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := take(path, writesAll)
	must(t, err)
	refused, err := take(path, writesAll)
	if !errors.Is(err, errHeld) {
		t.Fatalf("want %v\ngot  %v", errHeld, err)
	}
	(&Lock{[]*os.File{first}}).Release()
	next, err := take(path, writesAll)
	must(t, err)
	defer next.Close()
	(&Lock{[]*os.File{refused}}).Release()
	second, err := take(path, writesAll)
	if !errors.Is(err, errHeld) {
		t.Errorf("a second owner\nwant %v\ngot  %v", errHeld, err)
	}
	second.Close()
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"pid": 7, "owner": "sandbox", "path": "/store", "read_only": true}`))
	f.Add([]byte("{}"))
	f.Add([]byte(`{"pid": -1, "owner": "\u001b[31m", "path": "` + strings.Repeat("x", maxRecord)))
	f.Fuzz(func(t *testing.T, text []byte) {
		h := parse(text).holder()
		if h.PID < 0 || h.How == "" || h.How != holders.Printable(h.How) {
			t.Errorf("%q:\nwant a holder that can be shown\ngot  %+v", text, h)
		}
	})
}

func TestDirectoryThatOthersCanReplaceIsRefused(t *testing.T) {
	for name, mode := range map[string]os.FileMode{"all may write it": 0o777, "a group may write it": 0o775} {
		parent := filepath.Join(open(t), "directvol-1000")
		must(t, os.Mkdir(parent, 0o700))
		must(t, os.Chmod(parent, mode))
		for _, dir := range []string{filepath.Join(parent, "stores"), filepath.Join(parent, "directvol", "stores")} {
			if _, err := claim(t, In(dir), image(t), "sandbox one", false); err == nil || !strings.Contains(err.Error(), "write "+parent) {
				t.Errorf("%s, locks in %s\nwant it refused\ngot  %v", name, dir, err)
			}
		}
		must(t, os.Chmod(parent, mode|os.ModeSticky))
		_, err := claim(t, In(filepath.Join(parent, "stores")), image(t), "sandbox one", false)
		must(t, err)
	}
}

func TestDirectoryBelowAnothersIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it takes another user's directory: run go test ./host/registry as root")
	}
	parent := filepath.Join(open(t), "directvol-1000")
	must(t, os.Mkdir(parent, 0o755))
	must(t, os.Chown(parent, 1000, 1000))
	link := filepath.Join(open(t), "link")
	must(t, os.Symlink(parent, link))
	for _, dir := range []string{parent, link} {
		if _, err := claim(t, In(filepath.Join(dir, "stores")), image(t), "sandbox one", false); err == nil || !strings.Contains(err.Error(), parent) {
			t.Errorf("locks below %s\nwant it refused\ngot  %v", dir, err)
		}
	}
}

// open returns a directory that everyone may enter, with no private directory above it.
func open(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "stores")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755))
	return dir
}

// A login session has an XDG_RUNTIME_DIR, while a unit or cron job has none.
func TestLocksOfAUserLieInOnePlace(t *testing.T) {
	for user, want := range map[int]string{0: "/run/directvol/stores", 1000: "/tmp/directvol-1000/stores"} {
		for _, environment := range []string{"", t.TempDir()} {
			t.Setenv("XDG_RUNTIME_DIR", environment)
			t.Setenv("TMPDIR", environment)
			if got := defaultDir(user); got != want {
				t.Errorf("user %d, with %q\nwant %s\ngot  %s", user, environment, want, got)
			}
		}
	}
	if got, want := Default().dir, defaultDir(os.Geteuid()); got != want {
		t.Errorf("default\nwant %s\ngot  %s", want, got)
	}
}

func TestLoopDeviceThatGetsAnotherFileIsRefused(t *testing.T) {
	s, first, second := In(filepath.Join(t.TempDir(), "stores")), image(t), image(t)
	device := loopDevice(t, "--read-only", first)
	store, err := s.Find(device)
	must(t, err)
	defer store.Close()
	// The device is never free in between, because another process might take it.
	loop, err := os.Open(device)
	must(t, err)
	defer loop.Close()
	other, err := os.Open(second)
	must(t, err)
	defer other.Close()
	const changeFile = 0x4c06 // LOOP_CHANGE_FD of <linux/loop.h>
	must(t, unix.IoctlSetInt(int(loop.Fd()), changeFile, int(other.Fd())))
	if err := store.Claim("sandbox one", true); err == nil || !strings.Contains(err.Error(), "another file") {
		t.Errorf("first on %s, now on %s\nwant a refusal\ngot  %v", first, second, err)
	}
	_, err = claim(t, s, second, "sandbox two", false)
	must(t, err)
}

// The test tries each pair of uses by two owners on one lock file. Bytes of a disk may also belong
// to a partition.
func TestUsesThatExcludeEachOther(t *testing.T) {
	names := [uses]string{readsAll: "reads", writesAll: "writes", readsPart: "reads a part", writesPart: "writes a part"}
	beside := map[[2]int]bool{
		{readsAll, readsAll}: true, {readsAll, readsPart}: true, {readsPart, readsPart}: true, {readsPart, writesPart}: true, {writesPart, writesPart}: true,
	}
	for first := range names {
		for second := range names {
			path := filepath.Join(t.TempDir(), "lock")
			held, err := take(path, first)
			must(t, err)
			other, err := take(path, second)
			if want := beside[[2]int{first, second}] || beside[[2]int{second, first}]; want != (err == nil) || err != nil && !errors.Is(err, errHeld) {
				t.Errorf("one %s, and another %s\nwant both: %v\ngot  %v", names[first], names[second], want, err)
			}
			held.Close()
			other.Close()
		}
	}
}
