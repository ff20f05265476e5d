// Package trialtest provides, for tests, stores that hang on demand.
package trialtest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// longest is how long a server may be stopped. Processes that wait for the store take no signal,
// and would outlive a test that fails while the server is stopped.
const longest = time.Minute

// Serve returns a store whose server decides how long closing a descriptor takes. stop stops the
// server, for a minute at most, and answer lets it continue.
func Serve(t *testing.T) (path string, stop, answer func()) {
	t.Helper()
	dir := t.TempDir()
	disk, path, pidFile := filepath.Join(dir, "disk"), filepath.Join(dir, "store"), filepath.Join(dir, "pid")
	for file, bytes := range map[string]int{disk: 1 << 20, path: 0} {
		if err := os.WriteFile(file, make([]byte, bytes), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.CommandContext(t.Context(), "qemu-storage-daemon", "--daemonize", "--pidfile", pidFile,
		"--blockdev", "driver=file,node-name=disk,filename="+disk, "--export", "type=fuse,id=export,node-name=disk,writable=on,mountpoint="+path).CombinedOutput()
	if err != nil {
		t.Skipf("serve a file: %v: %s: run the test as root, with /dev/fuse and the package qemu-system-common", err, out)
	}
	text, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	signal := func(s unix.Signal) {
		if err := unix.Kill(pid, s); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(func() {
		signal(unix.SIGCONT)
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) { // the test may have unmounted it
			t.Error(err)
		}
		signal(unix.SIGTERM)
	})
	stop = func() {
		signal(unix.SIGSTOP)
		goOn := time.AfterFunc(longest, func() { _ = unix.Kill(pid, unix.SIGCONT) })
		t.Cleanup(func() { goOn.Stop() })
	}
	return path, stop, func() { signal(unix.SIGCONT) }
}

// The ioctls that stop and resume all writing to a filesystem (include/uapi/linux/fs.h).
const fiFreeze, fiThaw = 0xc0045877, 0xc0045878

// Freezable returns the directory of an ext4 with the given size, for stores whose writes hang:
// after freeze, a process that writes there waits in the kernel and takes no signal, as with a dead
// disk, until thaw. Whatever uses the directory must have ended when the test has.
func Freezable(t *testing.T, bytes int64) (dir string, freeze, thaw func()) {
	t.Helper()
	disk, dir := filepath.Join(t.TempDir(), "ext4"), t.TempDir()
	err := os.WriteFile(disk, nil, 0o600)
	if err == nil {
		err = os.Truncate(disk, bytes)
	}
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", disk).CombinedOutput(); err != nil {
		t.Skipf("no ext4 (install e2fsprogs): %v %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", disk, dir).CombinedOutput(); err != nil {
		t.Skipf("no mounts (run as root, where the kernel has loop): %v %s", err, out)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	call := func(request uint) error { return unix.IoctlSetInt(int(root.Fd()), request, 0) }
	freeze = func() {
		if err := call(fiFreeze); err != nil {
			t.Error(err)
		}
	}
	return dir, freeze, func() { _ = call(fiThaw) } // fails if already thawed
}
