package volume

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
)

// scheduled owns a volume and returns what a round of trims logs. The disk ends a number of
// requests in each look at it.
func scheduled(t *testing.T, requests uint64, spoil func(device string)) (logged string, trimmed uint64) {
	t.Helper()
	table, dir, _ := trimmable(t, "ext4", 320<<20)
	top, err := mount.Topmost(dir)
	must(t, err)
	spoil(top.Source) // before the first examination, which the trims must know
	must(t, table.Own(dir, mount.Identity{}, health.Past{}))
	v, err := table.Lookup(dir)
	must(t, err)
	if _, err := v.watch.Conditions(t.Context()); err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	log := logrus.New()
	log.SetOutput(&text)
	before := table.Trimmed()
	var ended uint64
	s := schedule{table: table, log: logrus.NewEntry(log), look: time.Microsecond, again: time.Microsecond, ended: func(uint64) uint64 { ended += requests; return ended }}
	s.round(t.Context())
	return text.String(), table.Trimmed() - before
}

func TestOwnedVolumeIsTrimmedOnSchedule(t *testing.T) {
	logged, trimmed := scheduled(t, busyRequests, func(string) {})
	if trimmed == 0 || strings.Count(logged, "volume trimmed") != 1 {
		t.Errorf("want one trim\ngot  %d bytes, logged %s", trimmed, logged)
	}
}

func TestVolumeWithAConditionOrWithoutDiscardsIsNotTrimmedOnSchedule(t *testing.T) {
	for name, spoil := range map[string]func(device string){
		"recorded errors": func(device string) {
			must(t, os.WriteFile("/sys/fs/ext4/"+filepath.Base(device)+"/trigger_fs_error", []byte("x"), 0))
		},
		"no discards": func(device string) {
			must(t, os.WriteFile("/sys/block/"+filepath.Base(device)+"/queue/discard_max_bytes", []byte("0"), 0))
		},
	} {
		t.Run(name, func(t *testing.T) {
			if logged, trimmed := scheduled(t, 0, spoil); trimmed != 0 || logged != "" {
				t.Errorf("want nothing trimmed and nothing logged\ngot  %d bytes, logged %s", trimmed, logged)
			}
		})
	}
}

func TestVolumeOfABusyDiskIsNotTrimmedOnSchedule(t *testing.T) {
	if logged, trimmed := scheduled(t, busyRequests+1, func(string) {}); trimmed != 0 || strings.Count(logged, "its disk is busy") != 1 {
		t.Errorf("want nothing trimmed, and the reason logged once\ngot  %d bytes, logged %s", trimmed, logged)
	}
}

// Nothing runs before the first round, which is within the interval, and nothing after ctx's end.
func TestScheduleWaitsForItsIntervalAndEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			newTable().TrimEvery(ctx, time.Hour, logrus.NewEntry(logrus.New()))
		}()
		newTable().TrimEvery(ctx, 0, logrus.NewEntry(logrus.New())) // never
		began := time.Now()
		if !pause(ctx, 100*time.Hour) || time.Since(began) != 100*time.Hour {
			t.Errorf("want a pause of 100 h\ngot  %v", time.Since(began))
		}
		cancel()
		<-ended
		if pause(ctx, time.Hour) || time.Since(began) != 100*time.Hour {
			t.Errorf("want no pause after the end\ngot  %v", time.Since(began)-100*time.Hour)
		}
	})
}
