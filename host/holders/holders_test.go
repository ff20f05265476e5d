package holders

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// image makes a file of 16 MiB that nothing uses.
func image(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, os.Truncate(path, 16<<20))
	return path
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func opened(t *testing.T, path string) *Disk {
	t.Helper()
	d, err := Open(path)
	must(t, err)
	t.Cleanup(func() { d.Close() })
	return d
}

// inUse fails the test unless err says that the disk is in use and contains each of the words.
func inUse(t *testing.T, err error, says ...string) {
	t.Helper()
	if _, ok := errors.AsType[*InUseError](err); !ok {
		t.Errorf("\nwant the disk refused as in use\ngot  %v", err)
		return
	}
	for _, words := range says {
		if !strings.Contains(err.Error(), words) {
			t.Errorf("\nwant it to say %q\ngot  %v", words, err)
		}
	}
}

func find(t *testing.T, d *Disk) error {
	t.Helper()
	found, err := d.Settled(t.Context(), nil)
	must(t, err)
	return found.Err(d.Name())
}

func TestDiskThatNobodyHasIsClaimedOnce(t *testing.T) {
	path := image(t)
	d := opened(t, path)
	must(t, find(t, d))
	must(t, d.Claim())
	must(t, find(t, d)) // the disk's own claim does not count as another's
	other := opened(t, path)
	inUse(t, other.Claim(), "image lock")
	must(t, d.Unlock())
	must(t, other.Claim())
}

// holdOpen makes another process open a file until the test ends. The process is a shell that
// reports when the file is open.
func holdOpen(t *testing.T, redirection, path string) int {
	t.Helper()
	cmd := exec.Command("sh", "-c", "exec "+redirection+` "$1" && echo open && read end`, "sh", path)
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		in.Close()
		cmd.Wait() // returns the status of a read that met the end of its input
	})
	if said, err := bufio.NewReader(out).ReadString('\n'); said != "open\n" {
		t.Fatalf("sh %s %s: said %q, %v", redirection, path, said, err)
	}
	return cmd.Process.Pid
}

func TestProcessThatHasTheDiskOpenIsNamed(t *testing.T) {
	path := image(t)
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(path, link))
	hard := filepath.Join(filepath.Dir(path), "hard")
	must(t, os.Link(path, hard))
	for redirection, how := range map[string]string{"3<": "has it open", "3>>": "has it open for writing"} {
		t.Run(redirection, func(t *testing.T) {
			pid := holdOpen(t, redirection, hard)
			d := opened(t, link)
			err := find(t, d)
			inUse(t, err, fmt.Sprintf("sh (pid %d) %s", pid, how))
			if err != nil && !strings.HasSuffix(err.Error(), how) {
				t.Errorf("\nwant it to end with %q\ngot  %v", how, err)
			}
			found, err := d.Find(func(except int) bool { return except == pid })
			must(t, err)
			must(t, found.Err(link)) // an excluded process is not found
		})
	}
	must(t, find(t, opened(t, link)))
}

// The search is for the disk that was opened, even if its name now leads elsewhere.
func TestDiskIsKnownByItsInode(t *testing.T) {
	path := image(t)
	d := opened(t, path)
	must(t, os.Rename(path, path+".old"))
	must(t, os.WriteFile(path, nil, 0o600))
	holdOpen(t, "3>>", path)
	must(t, find(t, d))
	holdOpen(t, "3>>", path+".old")
	inUse(t, find(t, d))
	if got, err := os.Stat(d.Path()); err != nil || got.Size() != 16<<20 {
		t.Errorf("%s\nwant the file that was opened\ngot  %v, error %v", d.Path(), got, err)
	}
}

func TestRenamedDiskIsReportedWithItsNewName(t *testing.T) {
	for want, change := range map[string]func(path string) error{
		"has no name any more": os.Remove,
		"no name any more: ":   func(path string) error { return errors.Join(os.Remove(path), os.WriteFile(path, nil, 0o600)) },
		"opened is /":          func(path string) error { return os.Rename(path, path+".old") },
		"disk.img.old":         func(path string) error { return errors.Join(os.Rename(path, path+".old"), os.Mkdir(path, 0o700)) },
	} {
		path := image(t)
		link := filepath.Join(t.TempDir(), "link")
		must(t, os.Symlink(path, link))
		d := opened(t, link)
		must(t, d.Named())
		must(t, d.Claim())
		must(t, d.Named())
		must(t, change(path))
		if err := d.Named(); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), link) {
			t.Errorf("\nwant %q\ngot  %v", want, err)
		}
	}
}

// lockAs locks a file as QEMU does for a disk that a guest writes: bytes for what QEMU does with
// the image, and bytes for what it does not share (raw_apply_lock_bytes in block/file-posix.c).
func lockAs(t *testing.T, path string, bytes ...int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	for _, at := range bytes {
		must(t, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: at, Len: 1}))
	}
}

func TestLockOfAQEMUThatCannotBeSeenIsEnough(t *testing.T) {
	for name, bytes := range map[string][]int64{"writer": {100, 101, 103, 201}, "reader": {100, 201}, "any other": {0}} {
		t.Run(name, func(t *testing.T) {
			path := image(t)
			d := opened(t, path)
			lockAs(t, path, bytes...)
			inUse(t, d.Claim(), "lock")
		})
	}
}

func TestClaimKeepsQEMUsLocksOutUntilUnlock(t *testing.T) {
	path := image(t)
	d := opened(t, path)
	must(t, d.Claim())
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	lock := func(at int64) error {
		return unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: at, Len: 1})
	}
	for _, at := range []int64{100, 101, 103, 163, 201, 263} {
		if err := lock(at); !errors.Is(err, unix.EAGAIN) {
			t.Errorf("byte %d of a disk that is claimed\nwant %v\ngot  %v", at, unix.EAGAIN, err)
		}
	}
	must(t, d.Unlock())
	must(t, lock(101))
	inUse(t, d.Lock(), "byte 101")
}

// Between fork and exec, a process started by another goroutine has a copy of each descriptor.
func TestDiskThatIsClosedIsLockedByNoCopyOfItsDescriptor(t *testing.T) {
	path := image(t)
	d := opened(t, path)
	must(t, d.Claim())
	copied, err := unix.FcntlInt(d.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(copied)
	must(t, d.Close())
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	if holder, err := Locked(f); holder != nil || err != nil {
		t.Errorf("holders of a closed disk\nwant none\ngot  %v, %v", holder, err)
	}
}

func TestFileThatIsNotADiskIsRefusedByItsType(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	must(t, unix.Mkfifo(fifo, 0o600))
	for path, want := range map[string]string{
		dir: "a directory", fifo: "a FIFO", "/dev/null": "a character device", filepath.Join(dir, "none"): "no such file",
	} {
		if d, err := Open(path); err == nil {
			d.Close()
			t.Errorf("%s was opened", path)
		} else if !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("\nwant %q, by its name %s\ngot  %v", want, path, err)
		}
	}
}

func TestUnwritableDiskIsRefusedWithARemedy(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may write to everything: run go test ./host/holders as an ordinary user")
	}
	path := image(t)
	must(t, os.Chmod(path, 0o400))
	d := opened(t, path)
	if err := d.Claim(); !errors.Is(err, unix.EACCES) || !strings.Contains(err.Error(), "as root") {
		t.Errorf("\nwant it refused with a way out\ngot  %v", err)
	}
}
