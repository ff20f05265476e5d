package volume

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// The time that a caller waits proves nothing: a caller with a short deadline gets an error and no
// condition, and so do later callers.
func TestCallersOwnDeadlineIsNoCondition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := &Volume{Mountpoint: "/volume", FSType: "ext4", last: &Stats{at: time.Now()}}
		m, _ := v.begin() // a statfs that has not answered yet
		ask := func(patience time.Duration) (Stats, error) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			return v.stats(ctx)
		}
		for range 3 {
			if stats, err := ask(measureLimit / 4); errkind.Of(err) != errkind.DeadlineExceeded || len(stats.Conditions) > 0 {
				t.Errorf("by a caller with a shorter wait\nwant a DeadlineExceeded\ngot  %v, error %v", stats.Conditions, err)
			}
		}
		if stats, err := ask(time.Hour); err != nil || len(stats.Conditions) != 1 || stats.Conditions[0].Reason != health.ReasonIOSlow {
			t.Errorf("when it has been waited for for as long as it has\nwant %s\ngot  %v, error %v", health.ReasonIOSlow, stats.Conditions, err)
		}
		m.stats = &Stats{}
		v.last, v.measuring = m.stats, nil
		close(m.done)
		v.measuring = &measurement{began: time.Now(), done: m.done, stats: m.stats}
		if stats, err := ask(time.Hour); err != nil || len(stats.Conditions) > 0 {
			t.Errorf("when it answers\nwant no condition\ngot  %v, error %v", stats.Conditions, err)
		}
	})
}

// A caller with a short deadline gets its answer before that: when a filesystem does not answer,
// and when the first question after a long time waits for an examination.
func TestStatisticsAreAnsweredBeforeTheirDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := &Volume{Mountpoint: "/volume", FSType: "ext4", last: &Stats{at: time.Now()}}
		m, _ := v.begin() // a statfs that does not answer
		defer close(m.done)
		ctx, cancel := context.WithTimeout(t.Context(), measureLimit/2)
		defer cancel()
		if _, err := v.stats(ctx); err == nil || ctx.Err() != nil {
			t.Errorf("want an error, and time for it to arrive\ngot  error %v, %v", err, ctx.Err())
		}
	})
}

// If statfs has not answered for measureLimit, Stats returns the earlier statistics with a
// condition, or an error if there are none.
func TestLateStatisticsComeFromMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, last := range []*Stats{{Bytes: Usage{Total: 7}, at: time.Now()}, nil} {
			v := &Volume{Mountpoint: "/volume", FSType: "ext4", last: last}
			m, _ := v.begin() // a statfs that does not answer
			began := time.Now()
			stats, err := v.stats(t.Context())
			if waited := time.Since(began); waited != measureLimit {
				t.Errorf("waited\nwant %v\ngot  %v", measureLimit, waited)
			}
			switch {
			case last == nil && errkind.Of(err) != errkind.DeadlineExceeded:
				t.Errorf("never measured\nwant a DeadlineExceeded\ngot  %+v, error %v", stats, err)
			case last != nil && (err != nil || stats.Bytes != last.Bytes || len(stats.Conditions) != 1 || stats.Conditions[0].Status != health.Degraded || stats.Conditions[0].Reason != health.ReasonIOSlow):
				t.Errorf("measured before\nwant that, and %s\ngot  %+v, error %v", health.ReasonIOSlow, stats, err)
			}
			close(m.done)
		}
	})
}

// Statistics that have come count, even if the caller runs so late that its time is over, too.
func TestStatisticsThatHaveComeCountHoweverLateTheirCallerRuns(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	done := make(chan struct{})
	close(done)
	for range 64 { // select would choose by chance
		v := &Volume{Mountpoint: "/volume", FSType: "ext4", last: &Stats{}}
		v.measuring = &measurement{began: time.Now().Add(-time.Hour), done: done, stats: &Stats{}}
		if stats, err := v.stats(over); err != nil || len(stats.Conditions) > 0 {
			t.Fatalf("want no condition\ngot  %v, error %v", stats.Conditions, err)
		}
	}
}

// Nobody has written to a volume or asked about it for a long time. The first who asks gets what is
// true now, not what an examination has found long ago.
func TestFirstQuestionAfterALongTimeGetsWhatIsTrueNow(t *testing.T) {
	dir := mounttest.Dir(t)
	mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, "xfs")), dir, "xfs", 0, "")
	synctest.Test(t, func(t *testing.T) {
		table := newTable()
		table.monitor.Low = health.Thresholds{Space: health.MaxThreshold}
		defer func() { table.Forget(dir); synctest.Wait() }()
		ask := func(when string, conditions int) {
			t.Helper()
			if stats, err := table.Stats(t.Context(), dir); err != nil || len(stats.Conditions) != conditions {
				t.Errorf("%s\nwant %d conditions\ngot  %v, error %v", when, conditions, stats.Conditions, err)
			}
		}
		ask("mounted", 0)
		time.Sleep(24 * time.Hour)
		if _, ok := table.StatsAtOnce(dir); ok {
			t.Error("answered at once, from a look that is hours old")
		}
		synctest.Wait()
		time.Sleep(24 * time.Hour)
		file, err := os.Create(filepath.Join(dir, "file"))
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		if err := unix.Fallocate(int(file.Fd()), 0, 0, 200<<20); err != nil {
			t.Fatal(err)
		}
		ask("filled meanwhile", 1)
	})
}

// An ext4 returns a filesystem ID from statfs that is made from its UUID, which may be changed
// while it is mounted (tune2fs -U).
func TestVolumeWithANewUUIDIsTheSame(t *testing.T) {
	dir := mounttest.Dir(t)
	disk := mounttest.Attach(t, mounttest.Image(t, "ext4", "-O", "metadata_csum_seed"))
	mounttest.Mount(t, disk, dir, "ext4", 0, "")
	table := newTable()
	if _, err := table.Stats(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("tune2fs", "-U", "random", disk).CombinedOutput(); err != nil {
		t.Skipf("it gives a mounted ext4 another UUID: tune2fs: %v: %s", err, out)
	}
	for range 2 {
		if _, err := table.Stats(t.Context(), dir); err != nil {
			t.Errorf("want its statistics\ngot  %v", err)
		}
	}
	table.Forget(dir)
}
