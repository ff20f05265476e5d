package holders

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// loopDevice makes a loop device over a file until the test ends.
func loopDevice(t *testing.T, path string) string {
	t.Helper()
	out, err := exec.Command("losetup", "--find", "--show", path).CombinedOutput()
	if err != nil {
		t.Skipf("no loop device: losetup: %v: %s: run go test ./host/holders as root on a host whose kernel has loop devices", err, strings.TrimSpace(string(out)))
	}
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", device).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v\n%s", device, err, out)
		}
	})
	return device
}

func mkfs(t *testing.T, path string) {
	t.Helper()
	if out, err := exec.Command("/usr/sbin/mkfs.ext4", "-q", "-F", path).CombinedOutput(); err != nil {
		t.Skipf("mkfs.ext4: %v: %s: apt-get install e2fsprogs, and run go test ./host/holders", err, out)
	}
}

func TestFileBelowALoopDeviceIsRefused(t *testing.T) {
	path := image(t)
	device := loopDevice(t, path)
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(path, link))
	inUse(t, find(t, opened(t, link)), device+" is a loop device on it")
}

// sh opens the device by a node of its own: the device number identifies the disk, not the name.
func TestBlockDeviceIsKnownByItsNumber(t *testing.T) {
	path := image(t)
	device := loopDevice(t, path)
	d := opened(t, device)
	must(t, find(t, d))
	var st unix.Stat_t
	must(t, unix.Stat(device, &st))
	node := filepath.Join(t.TempDir(), "node")
	must(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(st.Rdev)))
	holdOpen(t, "3>>", node)
	inUse(t, find(t, d), "has it open for writing")
}

func TestFileOfALoopDeviceCountsAsTheDevice(t *testing.T) {
	path := image(t)
	device := loopDevice(t, path)
	holdOpen(t, "3>>", path)
	inUse(t, find(t, opened(t, device)), "has "+path+" open for writing")
}

func TestSecondLoopDeviceOnTheSameFileIsFound(t *testing.T) {
	path := image(t)
	first, second := loopDevice(t, path), loopDevice(t, path)
	inUse(t, find(t, opened(t, first)), second)
}

func TestMountedDeviceIsRefusedWithWhere(t *testing.T) {
	path := image(t)
	mkfs(t, path)
	device := loopDevice(t, path)
	dir := t.TempDir()
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != nil {
		t.Skipf("mount: %v: run go test ./host/holders as root on a host whose kernel has ext4", err)
	}
	defer unix.Unmount(dir, 0)
	d := opened(t, device)
	inUse(t, find(t, d), "it is mounted on "+dir)
	inUse(t, d.Claim(), "a mount")
}

func TestReaderThatStaysIsAHolder(t *testing.T) {
	device := loopDevice(t, image(t))
	holdOpen(t, "3<", device)
	inUse(t, find(t, opened(t, device)), "sh (pid ")
}

// A mount in another mount namespace appears in no list of this process.
func TestDeviceWithAnUnknownHolderIsRefused(t *testing.T) {
	device := loopDevice(t, image(t))
	d := opened(t, device)
	must(t, find(t, d))
	taken, err := os.OpenFile(device, os.O_RDONLY|unix.O_EXCL, 0)
	must(t, err)
	defer taken.Close()
	inUse(t, d.Claim(), "uses it exclusively")
}

func TestClaimedDeviceCannotBeMounted(t *testing.T) {
	path := image(t)
	mkfs(t, path)
	device := loopDevice(t, path)
	d := opened(t, device)
	must(t, d.Claim())
	dir := t.TempDir()
	if err := unix.Mount(device, dir, "ext4", 0, ""); !errors.Is(err, unix.EBUSY) {
		unix.Unmount(dir, 0)
		t.Errorf("mount of a claimed device\nwant %v\ngot  %v", unix.EBUSY, err)
	}
	must(t, find(t, d))
}

// e2fsck(8) opens a device exclusively, and fails if another process has done so.
func TestYieldedDeviceCanBeTakenByAnotherAndStaysLocked(t *testing.T) {
	device := loopDevice(t, image(t))
	d := opened(t, device)
	must(t, d.Claim())
	take := func() (*os.File, error) { return os.OpenFile(device, os.O_RDWR|unix.O_EXCL, 0) }
	if other, err := take(); !errors.Is(err, unix.EBUSY) {
		other.Close()
		t.Errorf("a claimed device\nwant %v\ngot  %v", unix.EBUSY, err)
	}
	d.Yield()
	other, err := take()
	must(t, err)
	err = unix.FcntlFlock(other.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: 101, Len: 1})
	if !errors.Is(err, unix.EAGAIN) {
		t.Errorf("QEMU's byte of a yielded device\nwant %v\ngot  %v", unix.EAGAIN, err)
	}
	inUse(t, d.Take(), "uses it exclusively")
	must(t, other.Close())
	must(t, d.Take())
	must(t, find(t, d))
}

func TestReadOnlyDeviceIsRefusedWithARemedy(t *testing.T) {
	device := loopDevice(t, image(t))
	if out, err := exec.Command("blockdev", "--setro", device).CombinedOutput(); err != nil {
		t.Skipf("blockdev: %v: %s: apt-get install util-linux, and run go test ./host/holders as root", err, out)
	}
	d := opened(t, device)
	if err := d.Claim(); err == nil || !strings.Contains(err.Error(), "blockdev --setrw "+device) {
		t.Errorf("\nwant it refused with a way out\ngot  %v", err)
	}
	if out, err := exec.Command("blockdev", "--setrw", device).CombinedOutput(); err != nil {
		t.Fatalf("blockdev: %v: %s", err, out)
	}
	must(t, d.Claim())
	must(t, d.Named())
}

func TestSwapIsRefused(t *testing.T) {
	path := image(t)
	device := loopDevice(t, path)
	for _, command := range [][]string{{"mkswap", device}, {"swapon", device}} {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Skipf("%s: %v: %s: run go test ./host/holders as root on a host whose kernel has swap", command[0], err, out)
		}
	}
	defer exec.Command("swapoff", device).Run()
	d := opened(t, device)
	inUse(t, find(t, d), "is swap space")
	inUse(t, d.Claim(), "swap")
}

// A disk on more loop devices than are followed is refused, because the file below them could
// belong to another disk too.
func TestDiskOnTooManyLayersIsRefused(t *testing.T) {
	top := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(top, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for range maxLayers {
		file, err := os.Open(top)
		if err != nil {
			t.Fatal(err)
		}
		layers, _, err := Layers(file)
		file.Close()
		if err != nil || !strings.HasPrefix(layers[len(layers)-1].Key, "file-") {
			t.Fatalf("%s: want the file below it found\ngot  %v, %v", top, layers, err)
		}
		top = loopDevice(t, top)
	}
	file, err := os.Open(top)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if layers, _, err := Layers(file); err == nil || !strings.Contains(err.Error(), top) {
		t.Errorf("%s, on %d loop devices\nwant it refused\ngot  %v, %v", top, maxLayers, layers, err)
	}
}
