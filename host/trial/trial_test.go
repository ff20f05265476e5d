package trial

import (
	"context"
	"errors"
	"os"
	"path/filepath"
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
	if err == nil || errors.Is(err, ErrHangs) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), unix.ENOENT.Error()) {
		t.Errorf("want the path and %v\ngot  %v", unix.ENOENT, err)
	}
}

// fifo is a store that hangs: whoever opens it waits for a writer, as whoever reads a dead
// disk waits for the disk.
func fifo(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "store")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Who gives up before the store had its time is not told that it hangs; whoever tries it
// meanwhile joins the one process.
func TestStoreThatHangsHoldsUpOneProcess(t *testing.T) {
	path := fifo(t)
	var trials Trials
	began, _, err := trials.start(path, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := trials.Read(ctx, path, time.Hour); errors.Is(err, ErrHangs) || !errors.Is(err, context.Canceled) {
			t.Errorf("want %v alone\ngot  %v", context.Canceled, err)
		}
		if r, joined, err := trials.start(path, time.Hour); !joined || r != began || err != nil {
			t.Errorf("want the process that runs joined\ngot  another one, %v", err)
		}
	}
	// It answers, if with an error: who comes then is told of then.
	writer, err := os.OpenFile(path, os.O_RDWR, 0) // does not wait, and ends the wait of who reads
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	<-began.ended
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("store"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := trials.Read(t.Context(), path, time.Hour); err != nil {
		t.Errorf("when it answers: %v", err)
	}
}

// A store that had its time hangs, whoever asks, and its process is killed.
func TestStoreThatHadItsTimeHangs(t *testing.T) {
	path := fifo(t)
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
