package trial

import (
	"context"
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

func TestStoreThatAnswersIsFine(t *testing.T) {
	for _, size := range []int64{0, 1, 100000} {
		path := filepath.Join(t.TempDir(), "store")
		if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := new(Trials).Read(t.Context(), path, time.Hour); err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}

func TestStoreThatFailsIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none")
	err := new(Trials).Read(t.Context(), path, time.Hour)
	if !errors.Is(err, ErrUnreached) || errors.Is(err, ErrHangs) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), unix.ENOENT.Error()) {
		t.Errorf("want the path, %v and %v\ngot  %v", ErrUnreached, unix.ENOENT, err)
	}
}

// A Go program that has no memory or thread left for itself ends with status 2.
func TestTrialThatCrashesSaysNothingOfItsStore(t *testing.T) {
	for status, want := range map[int]error{statusFailed: nil, 2: ErrUntried, statusUnreached: ErrUnreached, 4: ErrUntried} {
		cmd := exec.Command("sh", "-c", "exit "+strconv.Itoa(status))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		err := awaitChild(cmd, time.Hour, new(strings.Builder)).err("store", time.Hour)
		for _, is := range []error{ErrUntried, ErrUnreached, ErrHangs} {
			if err == nil || errors.Is(err, is) != (is == want) {
				t.Errorf("status %d\nwant %v\ngot  %v", status, want, err)
			}
		}
	}
}

func TestFileThatIsNotAStoreIsNotOpened(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(fifo, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{fifo, link, "/dev/zero", dir} {
		err := new(Trials).Read(t.Context(), path, time.Hour)
		if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), ErrNoStore.Error()) {
			t.Errorf("%s\nwant %v\ngot  %v", path, ErrNoStore, err)
		}
	}
}

// leased returns a store that hangs, and a function that ends that. A process that opens the store
// waits until a lease (F_SETLEASE of fcntl(2)) is given up, as a process that reads a dead disk
// waits for the disk.
func leased(t *testing.T) (path string, answer func()) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "store")
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	if _, err := unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Skipf("lease on %s: %v: run go test ./host/trial with TMPDIR on a filesystem that has leases", path, err)
	}
	return path, func() { file.Close() }
}

// A caller that gives up before the limit must not be told that the store hangs. Other callers join
// the one process meanwhile.
func TestStoreThatHangsHoldsUpOneProcess(t *testing.T) {
	path, answer := leased(t)
	var trials Trials
	began, _ := trials.start(path, time.Hour)
	for range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := trials.Read(ctx, path, time.Hour); errors.Is(err, ErrHangs) || !errors.Is(err, context.Canceled) {
			t.Errorf("want %v alone\ngot  %v", context.Canceled, err)
		}
		if r, joined := trials.start(path, time.Hour); !joined || r != began {
			t.Error("want the process that runs joined\ngot  another one")
		}
	}
	answer()
	<-began.ended
	if err := trials.Read(t.Context(), path, time.Hour); err != nil {
		t.Errorf("when it answers: %v", err)
	}
}

// After the limit the store counts as hanging for every caller, and its process is killed.
func TestStoreWithoutAnAnswerInTimeHangs(t *testing.T) {
	path, _ := leased(t)
	var trials Trials
	if err := trials.Read(t.Context(), path, time.Millisecond); !errors.Is(err, ErrHangs) {
		t.Errorf("want %v\ngot  %v", ErrHangs, err)
	}
	trials.mu.Lock()
	r := trials.running[path]
	trials.mu.Unlock()
	if r != nil {
		<-r.ended
	}
}
