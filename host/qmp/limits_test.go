package qmp

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
)

func TestCommandWithoutADeadlineEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Client{lost: errors.New("QEMU hangs"), changed: make(chan struct{})} // there is no connection, and none comes
		began := time.Now()
		err := c.Execute(context.Background(), "device_add", nil, nil)
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != DefaultTimeout {
			t.Errorf("want it given up after %v\ngot  %v after %v", DefaultTimeout, err, time.Since(began))
		}
	})
}

func TestDialAndSettleHaveTheDefaultTimeout(t *testing.T) {
	limits := make(chan time.Duration, 2)
	began := time.Now()
	path := listen(t, negotiated(hangUp), negotiated(serve))
	c, err := Dial(context.Background(), path, func(ctx context.Context, _ Ask) ([]Event, error) {
		until, _ := ctx.Deadline()
		limits <- until.Sub(began)
		limits <- time.Until(until)
		return nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if since, left := <-limits, <-limits; since < DefaultTimeout || left > DefaultTimeout {
		t.Errorf("want Settle to end in %v\ngot  %v, %v of them left", DefaultTimeout, since, left)
	}
}

// Each attempt fails, because a file is no folder; that does not mean that QEMU has ended.
func TestPausesBetweenConnectionsDoubleUpToALimit(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for after, want := range map[time.Duration]time.Duration{
		firstPause / 2: firstPause, 2 * firstPause: 2 * firstPause, 5 * firstPause: 4 * firstPause, 10 * lastPause: lastPause,
	} {
		synctest.Test(t, func(t *testing.T) {
			c := &Client{path: filepath.Join(file, "qmp.sock")}
			c.life, c.finish = context.WithTimeout(t.Context(), after)
			defer c.finish()
			pause := time.Duration(0)
			if _, err := c.redial(&pause); !errors.Is(err, ErrClosed) || pause != want {
				t.Errorf("after %v\nwant a pause of %v\ngot  %v, %v", after, want, pause, err)
			}
		})
	}
}
