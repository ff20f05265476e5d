// Package trialtest provides, for tests, a store that hangs on demand.
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
