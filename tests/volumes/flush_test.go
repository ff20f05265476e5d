package volumes

import (
	"context"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// stoppedInFlush is a volume whose disk has stopped inside the flush of a writer's fsync.
type stoppedInFlush struct {
	*vm.Volume
	writer *remote.Writer
	device string
	wanted func([]*volumepb.Condition) bool
}

// While a disk is inside a flush, the kernel counts nothing as in flight, because writes wait for
// the flush. A read has to show whether the disk answers other requests. The test has three such
// disks at once: two answer nothing after the flush, and one hangs only in flushes.
func TestDiskThatStopsInAFlushIsReportedAndRecovers(t *testing.T) {
	g := guest(t)
	other := mounted(t, g, "xfs")
	hungOrSlow := func(all []*volumepb.Condition) bool { return hung(all) || slow(all) } // the disk answers reads
	var all []*stoppedInFlush
	for _, c := range []struct {
		fstype  string
		stopAll bool
		wanted  func([]*volumepb.Condition) bool
	}{{"ext4", true, hung}, {"xfs", true, hung}, {"ext4", false, hungOrSlow}} {
		v := mounted(t, g, c.fstype)
		s := &stoppedInFlush{v, written(t, v, 0), sizes(t, v).Device, c.wanted}
		inside, err := v.StopInFlush(limited(t), c.stopAll)
		must(t, err)
		healsAtEnd(t, v)
		select {
		case <-inside:
		case <-limited(t).Done():
			t.Fatalf("%s: no flush comes", v.ID)
		}
		all = append(all, s)
	}
	for _, s := range all {
		becomes(t, s.Volume, s.wanted)
	}
	writes := written(t, other, 4*miB)
	isHealthy(t, other)
	refusedRemoval(t, g, all)
	_, storage := attached(t, g, "ext4")
	must(t, container(t, g, "beside", storage))
	remove(t, g, "beside")
	for _, s := range all {
		must(t, s.Answer())
		must(t, s.writer.Await(within(t, jobLimit), s.writer.Ledger().Bytes()+4*kiB))
		must(t, s.writer.Stop(limited(t))) // before the volume is full
	}
	for _, s := range all {
		becomes(t, s.Volume, nothing)
		must(t, s.Heal(limited(t)))
		freshlyVerified(t, s.Volume, s.writer.Ledger().Bytes())
	}
	must(t, writes.Err())
	freshlyVerified(t, other, 4*miB)
}

// No thread but the agent's own waits in these flushes: that of a probe of an idle volume, and that
// of a call which removes a volume, for which the watch pauses. Nobody else's read shows whether
// the disk answers.
func TestDiskThatStopsInAFlushOfTheAgentIsSaidToHang(t *testing.T) {
	g := guest(t)
	probed, removed := mounted(t, g, "ext4"), mounted(t, g, "ext4")
	for _, v := range []*vm.Volume{probed, removed} {
		isHealthy(t, v) // its first probe has ended
	}
	inside := map[*vm.Volume]<-chan struct{}{}
	for _, v := range []*vm.Volume{probed, removed} {
		var err error
		inside[v], err = v.StopInFlush(limited(t), true)
		must(t, err)
		healsAtEnd(t, v)
	}
	must(t, g.Remote.WriteFile(limited(t), removed.GuestPath+"/dirty", make([]byte, 4*kiB)))
	err := answered(t, func(ctx context.Context) error { return g.Agent().RemoveContainer(ctx, removed.Container()) })
	refused(t, err, codes.DeadlineExceeded, sizes(t, removed).Device)
	for _, v := range []*vm.Volume{removed, probed} {
		select {
		case <-inside[v]:
		case <-limited(t).Done():
			t.Fatalf("%s: no flush comes", v.ID)
		}
		becomes(t, v, hung)
	}
	for _, v := range []*vm.Volume{removed, probed} {
		must(t, v.Answer())
		becomes(t, v, nothing)
		must(t, v.Heal(limited(t)))
	}
}

// refusedRemoval removes all of them at once. Every removal is refused, and each volume stays
// visible.
func refusedRemoval(t *testing.T, g *vm.Guest, all []*stoppedInFlush) {
	t.Helper()
	errs := make([]error, len(all))
	var wait sync.WaitGroup
	for i, s := range all {
		wait.Go(func() {
			errs[i] = answered(t, func(ctx context.Context) error { return g.Agent().RemoveContainer(ctx, s.Container()) })
		})
	}
	wait.Wait()
	for i, s := range all {
		refused(t, errs[i], codes.DeadlineExceeded, s.device)
		if !vmtest.IsMounted(t, g, s.GuestPath) || stats(t, s.Volume).Usage[0].Total == 0 {
			t.Errorf("%s is out of sight", s.ID)
		}
	}
}
