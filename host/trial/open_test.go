package trial

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// served returns a store whose descriptors take as long to close as its server wants, and
// what stops the server and lets it go on.
func served(t *testing.T) (path string, stop, answer func()) {
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
		t.Skipf("serve a file: %v: %s: run go test ./host/trial as root, with /dev/fuse and the package qemu-system-common", err, out)
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
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
		signal(unix.SIGTERM)
	})
	return path, func() { signal(unix.SIGSTOP) }, func() { signal(unix.SIGCONT) }
}

// A process that is started closes what it has inherited before it runs.
func TestStoreThatHangsAndIsOpenHoldsUpNoTrialOfAnother(t *testing.T) {
	if err := Prepare(); err != nil {
		t.Fatal(err)
	}
	path, stop, answer := served(t)
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	defer answer() // first
	stop()
	fine := filepath.Join(t.TempDir(), "fine")
	if err := os.WriteFile(fine, make([]byte, pageBytes), 0o600); err != nil {
		t.Fatal(err)
	}
	var trials Trials
	if err := trials.Read(t.Context(), fine, 10*time.Second); err != nil {
		t.Errorf("of a store that answers: %v", err)
	}
}

// When the process that starts the trials has ended, there is another one.
func TestTrialsOutliveTheirStarter(t *testing.T) {
	fine := filepath.Join(t.TempDir(), "fine")
	if err := os.WriteFile(fine, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := current()
	if err != nil {
		t.Fatal(err)
	}
	hung, _ := leased(t)
	var trials Trials
	waits, _ := trials.start(hung, time.Hour)
	if err := trials.Read(t.Context(), fine, time.Hour); err != nil { // behind the one that waits
		t.Error(err)
	}
	s.end.Close()
	<-waits.ended
	if waits.err == nil {
		t.Error("a trial whose process was ended says that the store answers")
	}
	if err := trials.Read(t.Context(), fine, time.Hour); err != nil {
		t.Error(err)
	}
}
