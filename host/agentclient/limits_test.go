package agentclient

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/protocols/address"
)

func TestCallWithoutADeadlineHasTenSeconds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nobody")
	synctest.Test(t, func(t *testing.T) {
		c := New(address.Address{Scheme: address.Unix, Path: path}, Config{})
		defer c.Close()
		began := time.Now()
		err := c.Check(context.Background())
		if status.Code(err) != codes.DeadlineExceeded || time.Since(began) != defaultTimeout {
			t.Errorf("want %v after %v\ngot  %v after %v", codes.DeadlineExceeded, defaultTimeout, err, time.Since(began))
		}
	})
}

// A socket appears at a time, with a peer whose answer ends the call: the call ends with the first
// attempt after that time.
func TestPausesBetweenAttemptsDoubleUpToALimit(t *testing.T) {
	for appears, want := range map[time.Duration]time.Duration{
		firstPause / 2: firstPause, 2 * firstPause: 3 * firstPause, 5 * firstPause: 7 * firstPause, 12 * firstPause: 15 * firstPause,
		20 * firstPause: 31 * firstPause, 32 * firstPause: 31*firstPause + longestPause, 52 * firstPause: 31*firstPause + 2*longestPause,
	} {
		hidden := hostile(t, "HTTP/1.1 400 Bad Request\r\n\r\n").Addr().String()
		path := hidden + "-in-sight"
		synctest.Test(t, func(t *testing.T) {
			c := New(address.Address{Scheme: address.Unix, Path: path}, Config{})
			defer c.Close()
			began := time.Now()
			time.AfterFunc(appears, func() {
				if err := os.Rename(hidden, path); err != nil {
					t.Error(err)
				}
			})
			err := c.Check(context.Background())
			if status.Code(err) != codes.Internal || time.Since(began) != want {
				t.Errorf("a socket that appears after %v\nwant it found after %v\ngot  %v, %v", appears, want, time.Since(began), err)
			}
		})
	}
}
