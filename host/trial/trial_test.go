package trial

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestStoreThatAnswersIsFine(t *testing.T) {
	for _, size := range []int64{0, 1, 100000} {
		path := filepath.Join(t.TempDir(), "store")
		if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := new(Trials).Read(t.Context(), path); err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}

func TestStoreThatFailsIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none")
	err := new(Trials).Read(t.Context(), path)
	if err == nil || errors.Is(err, ErrHangs) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), unix.ENOENT.Error()) {
		t.Errorf("want the path and %v\ngot  %v", unix.ENOENT, err)
	}
}

// A FIFO that nobody writes to hangs whoever opens it, as a dead disk does whoever reads.
func TestStoreThatHangsHoldsUpOneProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	var trials Trials
	began, _, err := trials.start(path)
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := trials.Read(ctx, path); !errors.Is(err, ErrHangs) || !errors.Is(err, context.Canceled) {
			t.Errorf("want %v\ngot  %v", ErrHangs, err)
		}
	}
	if len(trials.running) != 1 {
		t.Errorf("processes\nwant 1\ngot  %d", len(trials.running))
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
	if err := trials.Read(t.Context(), path); err != nil {
		t.Errorf("when it answers: %v", err)
	}
}

// The process that was killed goes, where the disk lets it.
func TestProcessOfAStoreThatHangsIsKilled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	var trials Trials
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := trials.Read(ctx, path); !errors.Is(err, ErrHangs) {
		t.Errorf("want %v\ngot  %v", ErrHangs, err)
	}
	trials.mu.Lock()
	r := trials.running[path]
	trials.mu.Unlock()
	if r != nil {
		<-r.ended
	}
}
