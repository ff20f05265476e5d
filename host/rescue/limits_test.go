package rescue

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// endless is a VM that does not end.
type endless struct{}

func (endless) Stop(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
func (endless) Kill(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

func TestVMThatDoesNotEndIsAwaitedForALimitedTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, began := new(rescue), time.Now()
		if r.powerOff(t.Context(), endless{}); time.Since(began) != stopLimit {
			t.Errorf("a power-off\nwant it awaited for %v\ngot  %v", stopLimit, time.Since(began))
		}
		over, cancel := context.WithCancel(t.Context())
		cancel()
		began = time.Now()
		if r.powerOff(over, endless{}); time.Since(began) != 0 {
			t.Errorf("a power-off after Ctrl-C took %v", time.Since(began))
		}
		if err := r.kill(over, endless{}); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != killLimit {
			t.Errorf("a killed QEMU, also after Ctrl-C\nwant it awaited for %v\ngot  %v, error %v", killLimit, time.Since(began), err)
		}
	})
}

// A superblock with many groups, which an attacker may have written, does not make rescue read the
// whole disk.
func TestGroupsThatAreAskedForAProofAreBounded(t *testing.T) {
	disk := new(counting)
	s := superblock{sector: make([]byte, 512), groups: 1 << 30, blockBytes: 4096, groupBytes: 16 << 20}
	if _, _, err := s.largest(t.Context(), disk); err == nil || disk.reads != maxAsked-1 {
		t.Errorf("old groups\nwant %d read, and no proof\ngot  %d, error %v", maxAsked-1, disk.reads, err)
	}
	disk.reads, s.groups = 0, 10
	if _, err := s.startsBelow(t.Context(), disk, superblock{groups: 1 << 30}); err != nil || disk.reads != maxAsked+1 {
		t.Errorf("new groups\nwant %d read\ngot  %d, error %v", maxAsked+1, disk.reads, err)
	}
}

// counting is a disk of whole groups without a superblock.
type counting struct{ reads int }

func (d *counting) ReadAt(b []byte, at int64) (int, error) {
	d.reads++
	clear(b)
	return len(b), nil
}
