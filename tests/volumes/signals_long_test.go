//go:build long

package volumes

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// others are faults that have a test of their own on the older kernel.
var others = []fault{
	{name: "a, writes fail", fstype: "btrfs", provoke: breakUnderAWriter, wanted: []condition{inWrites}, mend: healAndRemount},
	{name: "d, unplugged", fstype: "btrfs", provoke: unplugIdle, wanted: []condition{inDevice}, mend: reattach},
	{name: "a disk that hangs", fstype: "ext4", provoke: hangInAGrowth, wanted: []condition{{volumepb.Condition_INACCESSIBLE, "IOHung"}}, mend: answer},
	{name: "a disk that hangs", fstype: "xfs", provoke: hangInAGrowth, wanted: []condition{{volumepb.Condition_INACCESSIBLE, "IOHung"}}, mend: answer},
	{name: "one failed write", fstype: "ext4", provoke: from(failOneWrite), wanted: []condition{{volumepb.Condition_DEGRADED, "PastIOError"}}, mend: remount},
	{name: "one failed write", fstype: "xfs", provoke: from(failOneWrite), wanted: []condition{{volumepb.Condition_DEGRADED, "PastIOError"}}, mend: remount},
	{name: "a failed read", fstype: "ext4", provoke: from(failOneRead), wanted: []condition{{volumepb.Condition_DEGRADED, "ReadError"}}, mend: remount},
	{name: "a failed read", fstype: "xfs", provoke: from(failOneRead), wanted: []condition{{volumepb.Condition_DEGRADED, "ReadError"}}, mend: remount},
}

// The kernel is that of `make rescue`.
func TestEveryFaultIsAConditionOnTheNewerKernel(t *testing.T) {
	g := vmtest.Boot(t, vm.Options{Newer: true})
	provokesEach(t, g, append(faults, others...), false)
}

// from makes a fault's provoke from a function that returns when the agent has noticed the fault.
func from(provoke func(*testing.T, *vm.Guest, *vm.Volume)) func(*testing.T, *vm.Guest, *vm.Volume) time.Time {
	return func(t *testing.T, g *vm.Guest, v *vm.Volume) time.Time {
		t.Helper()
		began := now(t, g)
		provoke(t, g, v)
		return began
	}
}

func hangInAGrowth(t *testing.T, g *vm.Guest, v *vm.Volume) time.Time {
	t.Helper()
	must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), 2*disks[v.FSType]))
	must(t, v.Serve(limited(t)))
	healsAtEnd(t, v)
	began := now(t, g)
	must(t, v.Hang(limited(t)))
	short, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	refused(t, g.Agent().ResizeVolume(short, v.GuestPath, 0), codes.DeadlineExceeded)
	return began
}

func answer(t *testing.T, v *vm.Volume) {
	t.Helper()
	must(t, v.Answer())
	becomes(t, v, nothing)
}
