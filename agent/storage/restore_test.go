package storage

import (
	"testing"
	"testing/synctest"
	"time"
)

// A destroy that has failed waits for the storages that are being mounted again, all together, but
// not for one whose disk hangs.
func TestRestoreAfterAFailedDestroyHasALimit(t *testing.T) {
	restoring := func(ended, hangs bool) *departing {
		one := &departing{last: &step{done: make(chan struct{})}, done: make(chan struct{})}
		if !hangs {
			close(one.last.done)
		}
		if ended {
			close(one.done)
		}
		return one
	}
	const hangs, ended = true, true
	for name, test := range map[string]struct {
		all  func() []*departing
		want time.Duration
	}{
		"all are mounted again":  {func() []*departing { return []*departing{restoring(ended, !hangs), restoring(ended, !hangs)} }, 0},
		"a disk hangs":           {func() []*departing { return []*departing{restoring(!ended, hangs), restoring(ended, !hangs)} }, 0},
		"two mounts take longer": {func() []*departing { return []*departing{restoring(!ended, !hangs), restoring(!ended, !hangs)} }, restoreLimit},
	} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			d := &departure{all: test.all(), decided: make(chan struct{})}
			d.decide(false)
			<-d.decided
			if took := time.Since(began); took != test.want {
				t.Errorf("%s\nwant it to take %v\ngot  %v", name, test.want, took)
			}
		})
	}
}
