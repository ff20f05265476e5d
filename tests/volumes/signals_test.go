package volumes

import (
	"errors"
	"path"
	"testing"
	"time"

	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// fault is one way in which a volume fails.
type fault struct {
	name, fstype string
	options      []string
	// provoke provokes the fault, and returns the guest's time at which it began or, with a writer,
	// at which the first fsync failed.
	provoke func(t *testing.T, g *vm.Guest, v *vm.Volume) time.Time
	// wanted are the conditions that the fault causes; older is the first one on kernels before
	// 6.13, if it is another.
	wanted []condition
	older  condition
	mend   func(t *testing.T, v *vm.Volume)
}

// condition is a condition as a program tests for it.
type condition struct {
	status volumepb.Condition_Status
	reason string
}

var (
	inDevice   = condition{volumepb.Condition_INACCESSIBLE, "DeviceGone"}
	inShutdown = condition{volumepb.Condition_INACCESSIBLE, "Shutdown"}
	inReadOnly = condition{volumepb.Condition_INACCESSIBLE, "ReadOnly"}
	inWrites   = condition{volumepb.Condition_INACCESSIBLE, "IOError"}
	inRecord   = condition{volumepb.Condition_DEGRADED, "RecordedErrors"}
)

// faults are those of the table in agent/health's package comment.
var faults = []fault{
	{name: "a, writes fail", fstype: "ext4", provoke: breakUnderAWriter, wanted: []condition{inReadOnly, inRecord}, mend: healAndRepair},
	{name: "a, writes fail", fstype: "xfs", provoke: breakUnderAWriter, wanted: []condition{inShutdown}, mend: healAndRemount},
	{name: "b, shutdown", fstype: "ext4", provoke: shutDown, wanted: []condition{inShutdown}, older: inWrites, mend: remount},
	{name: "b, shutdown", fstype: "xfs", provoke: shutDown, wanted: []condition{inShutdown}, mend: remount},
	{name: "c1, an error", fstype: "ext4", options: []string{"errors=continue"}, provoke: triggerError, wanted: []condition{inRecord}, mend: repair},
	{name: "c2, an error that stops writes", fstype: "ext4", options: []string{"errors=remount-ro"}, provoke: triggerError, wanted: []condition{inReadOnly, inRecord}, mend: repair},
	{name: "d, unplugged", fstype: "ext4", provoke: unplugIdle, wanted: []condition{inDevice}, mend: reattach},
	{name: "d, unplugged", fstype: "xfs", provoke: unplugIdle, wanted: []condition{inDevice}, mend: reattach},
}

// Every fault is provoked in the guest's kernel, on a volume that is otherwise idle except in case
// a, and mended again.
func TestEveryFaultIsACondition(t *testing.T) { provokesEach(t, guest(t), faults, true) }

// provokesEach provokes each fault. The kernel is older than Linux 6.13 if older is set.
func provokesEach(t *testing.T, g *vm.Guest, faults []fault, older bool) {
	for _, f := range faults {
		t.Run(f.name+" on "+f.fstype, func(t *testing.T) {
			v := mounted(t, g, f.fstype, f.options...)
			isHealthy(t, v)
			began := f.provoke(t, g, v)
			wanted := append([]condition(nil), f.wanted...)
			if older && f.older != (condition{}) {
				wanted[0] = f.older
			}
			first, err := v.AwaitHealth(within(t, jobLimit), func(all []*volumepb.Condition) bool { return len(all) > 0 })
			must(t, err)
			t.Logf("first %s, %v after the first failure", first[0].Reason, time.UnixMilli(first[0].SinceUnixMilliseconds).Sub(began))
			for _, c := range wanted {
				t.Logf("%s, %v after the first failure", c.reason, since(t, v, c).Sub(began))
			}
			f.mend(t, v)
			isHealthy(t, v)
		})
	}
}

// since waits for a condition, and returns the guest's time of its beginning.
func since(t *testing.T, v *vm.Volume, c condition) (began time.Time) {
	t.Helper()
	becomes(t, v, func(all []*volumepb.Condition) bool {
		for _, one := range all {
			if one.Status == c.status && one.Reason == c.reason {
				began = time.UnixMilli(one.SinceUnixMilliseconds)
				return true
			}
		}
		return false
	})
	return began
}

func now(t *testing.T, g *vm.Guest) time.Time {
	t.Helper()
	now, err := g.Remote.Now(limited(t))
	must(t, err)
	return now
}

func breakUnderAWriter(t *testing.T, _ *vm.Guest, v *vm.Volume) time.Time {
	t.Helper()
	must(t, v.Resize(limited(t), 8*disks[v.FSType])) // room for all data until the fault
	writer := written(t, v, 0)
	must(t, v.BreakWrites(limited(t)))
	fails(t, writer)
	failure, ok := errors.AsType[*remote.Error](writer.Err())
	if !ok {
		t.Fatalf("the writer\nwant the guest's error\ngot  %v", writer.Err())
	}
	return time.UnixMilli(failure.UnixMilliseconds)
}

func shutDown(t *testing.T, g *vm.Guest, v *vm.Volume) time.Time {
	t.Helper()
	const flushJournal = 1
	began := now(t, g)
	must(t, g.Remote.ShutdownFS(limited(t), v.GuestPath, flushJournal))
	return began
}

func triggerError(t *testing.T, g *vm.Guest, v *vm.Volume) time.Time {
	t.Helper()
	trigger := "/sys/fs/ext4/" + path.Base(sizes(t, v).Device) + "/trigger_fs_error"
	began := now(t, g)
	must(t, g.Remote.WriteFile(limited(t), trigger, []byte("provoked")))
	return began
}

func unplugIdle(t *testing.T, g *vm.Guest, v *vm.Volume) time.Time {
	t.Helper()
	began := now(t, g)
	pull(t, g, v)
	return began
}

func healAndRemount(t *testing.T, v *vm.Volume) {
	t.Helper()
	must(t, v.Heal(limited(t)))
	remount(t, v)
}

func healAndRepair(t *testing.T, v *vm.Volume) {
	t.Helper()
	healAndRemount(t, v)
	repair(t, v)
}

func reattach(t *testing.T, v *vm.Volume) {
	t.Helper()
	must(t, v.Detach(limited(t)))
	must(t, v.Mount(limited(t)))
}
