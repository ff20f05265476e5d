// Package mounttest gives tests their own mounts and disks: a mount namespace that ends with the
// test, and loop devices (loop(4)) with real filesystems.
package mounttest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Own moves the test into a mount namespace that nobody else sees, on a thread that ends with the
// test. It returns an empty directory, by its path in mountinfo. Only the test's own goroutine sees
// the mounts.
func Own(t *testing.T) (dir string) {
	t.Helper()
	runtime.LockOSThread()
	err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS)
	if err == nil {
		err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	}
	if err != nil {
		t.Skipf("it needs a mount namespace of its own: %v: run it as root, with sudo go test -run '^%s$'", err, t.Name())
	}
	leaveOthers(t)
	return Dir(t)
}

// leaveOthers unmounts the namespace's copies of other tests' mounts, which would keep their disks
// in use.
func leaveOthers(t *testing.T) {
	t.Helper()
	copies, err := os.ReadFile("/proc/thread-self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(copies)) {
		if fields := strings.Fields(line); strings.HasPrefix(fields[1], os.TempDir()+"/") {
			_ = unix.Unmount(fields[1], unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) // a nested mount may have gone with its parent
		}
	}
}

// Dir returns an empty directory, by its path in mountinfo, for mounts that all processes see.
func Dir(t *testing.T) (dir string) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// imageBytes is enough for the mkfs of any filesystem.
const imageBytes = 320 << 20

// Image makes a filesystem in a file.
func Image(t *testing.T, fstype string, options ...string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), fstype+".img")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, imageBytes); err != nil {
		t.Fatal(err)
	}
	Format(t, fstype, path, options...)
	return path
}

// Format makes a filesystem in a file or on a disk, whatever it held before.
func Format(t *testing.T, fstype, path string, options ...string) {
	t.Helper()
	mkfs, err := exec.LookPath("mkfs." + fstype)
	if err != nil {
		mkfs, err = exec.LookPath("/sbin/mkfs." + fstype)
	}
	if err != nil {
		t.Skipf("it makes a %s: install mkfs.%s (e2fsprogs, xfsprogs, btrfs-progs)", fstype, fstype)
	}
	force := "-f"
	if strings.HasPrefix(fstype, "ext") {
		force = "-F"
	}
	Run(t, mkfs, append(options, "-q", force, path)...)
}

// Attach attaches an image to a loop device until the test ends.
func Attach(t *testing.T, image string) (device string) {
	t.Helper()
	losetup, err := exec.LookPath("losetup")
	if err != nil {
		t.Skip("it needs a loop device: install losetup (mount)")
	}
	device, remove := addLoop(t)
	if out, err := exec.Command(losetup, device, image).CombinedOutput(); err != nil {
		remove()
		t.Skipf("it needs a loop device: %v: %s: run it as root", err, out)
	}
	t.Cleanup(func() {
		_ = exec.Command(losetup, "-d", device).Run() // fails if the device was detached already
		remove()
	})
	return device
}

// firstLoop is the least number of a loop device that a test adds. losetup --find takes the least
// free number, so that other programs do not take these devices while [Reattach] leaves one free.
const firstLoop = 1000

// addLoop makes a loop device without an image (LOOP_CTL_ADD of linux/loop.h). If something is
// still mounted from the device, the kernel cannot remove it and the device stays.
func addLoop(t *testing.T) (device string, remove func()) {
	t.Helper()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("it needs a loop device: %v: run it as root", err)
	}
	for number := firstLoop; ; number++ {
		err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, number)
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if err != nil {
			_ = control.Close()
			t.Skipf("it needs a loop device: LOOP_CTL_ADD %d: %v: run it as root", number, err)
		}
		return fmt.Sprintf("/dev/loop%d", number), func() {
			_ = unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, number)
			_ = control.Close()
		}
	}
}

// Reattach replaces a disk's image, so that the next disk has the same name and number.
func Reattach(t *testing.T, device, image string) {
	t.Helper()
	Run(t, "losetup", "-d", device)
	Run(t, "losetup", device, image)
}

// SetSize changes the size of a disk and its image, even while it is mounted.
func SetSize(t *testing.T, device, image string, bytes int64) {
	t.Helper()
	if err := os.Truncate(image, bytes); err != nil {
		t.Fatal(err)
	}
	Run(t, "losetup", "-c", device)
}

// Mount mounts a source until the test ends.
func Mount(t *testing.T, source, dir, fstype string, flags uintptr, data string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(source, dir, fstype, flags, data); err != nil {
		t.Fatalf("mount %s of %s at %s with %q: %v", fstype, source, dir, data, err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

// aloneLock is a file that tests lock whose filesystems may not answer: shared by all of them, or
// by one that waits for every filesystem of this host.
var aloneLock = filepath.Join(os.TempDir(), "directvol-tests.filesystems")

// isAlone is set while a test of this process has the lock to itself.
var isAlone atomic.Bool

// Alone waits until no other test on this host has a filesystem that may not answer, and keeps such
// tests waiting until the test ends. It is for a test that calls sync(2), or flushes every mount.
func Alone(t *testing.T) {
	t.Helper()
	lockFilesystems(t, unix.LOCK_EX)
	isAlone.Store(true)
	t.Cleanup(func() { isAlone.Store(false) })
}

// mayHang notes that the test has a filesystem that may not answer.
func mayHang(t *testing.T) {
	t.Helper()
	if !isAlone.Load() {
		lockFilesystems(t, unix.LOCK_SH)
	}
}

// Freezable notes that the test freezes the filesystem at dir, and thaws it when the test ends.
func Freezable(t *testing.T, dir string) {
	t.Helper()
	mayHang(t)
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		const thaw = 0xc0045878 // FITHAW of linux/fs.h
		_ = unix.IoctlSetInt(int(root.Fd()), thaw, 0)
		root.Close()
	})
}

func lockFilesystems(t *testing.T, how int) {
	t.Helper()
	file, err := os.OpenFile(aloneLock, os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		err = unix.Flock(int(file.Fd()), how)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
}

// Hang mounts a filesystem whose server never answers (fuse(4)), until the test ends or release is
// called; then all pending requests fail.
func Hang(t *testing.T, dir string) (release func()) {
	t.Helper()
	mayHang(t)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	server, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Mount("hung", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server))
	}
	if err != nil {
		t.Skipf("it mounts a FUSE: %v: run it as root where /dev/fuse is", err)
	}
	release = sync.OnceFunc(func() {
		unix.Close(server)
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	})
	t.Cleanup(release)
	return release
}

// Unmount unmounts the topmost mount at a path.
func Unmount(t *testing.T, dir string) {
	t.Helper()
	if err := unix.Unmount(dir, 0); err != nil {
		t.Fatalf("unmount %s: %v", dir, err)
	}
}

// Await waits until is returns true, because another goroutine has seen a change of the mounts.
// what says so in words.
func Await(t *testing.T, what string, is func() bool) {
	t.Helper()
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for !is() {
		select {
		case <-again.C:
		case <-t.Context().Done():
			t.Fatal("it never came to be: " + what)
		}
	}
}

// Run runs a program and fails the test if the program fails.
func Run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
}
