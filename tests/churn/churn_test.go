package churn

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

const (
	// volumes is the number of volumes in use at once, and intruders the number of callers that
	// call any of them.
	volumes, intruders = 20, 4
	// setupLimit and endLimit are time limits, as bases for vm.Limit.
	setupLimit, endLimit = 2 * time.Minute, 2 * time.Minute
)

// patientAgent makes the agent wait longer for a disk than by default: on a busy machine a guest
// may see one of twenty disks seconds after QEMU attached it.
const patientAgent = "agent.hotplug_timeout=60"

func TestVolumesComeAndGoAsPromised(t *testing.T) { churned(t, 2*time.Minute) }

// churned runs callers on many volumes for duration.
func churned(t *testing.T, duration time.Duration) {
	g := vmtest.Boot(t, vm.Options{Append: patientAgent})
	c := &churn{guest: g}
	before := vmtest.Mounts(t, g)
	c.setUp(t)

	ctx, cancel := context.WithTimeout(t.Context(), duration)
	defer cancel()
	var callers sync.WaitGroup
	for _, v := range c.volumes {
		callers.Go(func() { c.volumeCaller(ctx, v) })
	}
	for range intruders {
		callers.Go(func() { c.intruder(ctx) })
	}
	callers.Wait()
	t.Logf("%d volumes for %v: %s", volumes, duration, c.count.String())
	for _, wrong := range c.count.broken {
		t.Error(wrong)
	}
	c.nothingIsLeft(t, before)
}

// setUp makes the volumes, writes the name of each into it, and learns their sizes.
func (c *churn) setUp(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), vm.Limit(setupLimit))
	defer cancel()
	for i := range volumes {
		v := &volume{bytes: uint64(firstBytes + i*stepBytes)}
		var err error
		v.Volume, err = c.guest.Volume(ctx, fmt.Sprintf("pvc-%d of/%s", i, strings.Repeat("a long name ", 8)), "ext4", int64(v.bytes))
		vmtest.Must(t, err)
		vmtest.Must(t, v.Mount(ctx))
		vmtest.Must(t, c.guest.Remote.WriteFile(ctx, v.GuestPath+"/"+nameFile, []byte(v.ID)))
		stats, err := v.Stats(ctx)
		vmtest.Must(t, err)
		v.total = stats.Usage[0].Total
		vmtest.Must(t, v.Detach(ctx))
		if i > 0 && v.total < c.volumes[i-1].total+stepBytes-miB {
			t.Fatalf("volume %d has %d bytes, the one before %d: they must differ", i, v.total, c.volumes[i-1].total)
		}
		c.volumes = append(c.volumes, v)
	}
}

// nothingIsLeft detaches all volumes, and checks the guest, QEMU and the disks.
func (c *churn) nothingIsLeft(t *testing.T, before string) {
	ctx, cancel := context.WithTimeout(t.Context(), vm.Limit(endLimit))
	defer cancel()
	for _, v := range c.volumes {
		if err := v.Detach(ctx); err != nil {
			t.Errorf("at the end: %v", err)
		}
	}
	if left := c.guest.Volumes(); len(left) > 0 {
		t.Errorf("the sandbox still has %q", left)
	}
	if after := vmtest.Mounts(t, c.guest); after != before {
		t.Errorf("mounts\nwant %s\ngot  %s", before, after)
	}
	partitions, err := c.guest.Remote.ReadFile(ctx, "/proc/partitions")
	if vmtest.Must(t, err); strings.Contains(string(partitions), " vd") {
		t.Errorf("the guest still has disks:\n%s", partitions)
	}
	var nodes []any
	if vmtest.Must(t, c.guest.VM().QMP().Execute(ctx, "query-named-block-nodes", map[string]bool{"flat": true}, &nodes)); len(nodes) > 0 {
		t.Errorf("QEMU still has block nodes: %v", nodes)
	}
	for _, v := range c.volumes {
		fsck, err := vm.Check(ctx, v.FSType, v.Path)
		if err = errors.Join(err, fsck.Err(v.FSType)); err != nil {
			t.Errorf("volume %s: %v", v.ID, err)
		}
	}
}

// A failure is counted under the kind that its caller can act on.
func TestFailuresAreCountedByKind(t *testing.T) {
	var c count
	c.add("mount", nil)
	c.add("mount", fmt.Errorf("wrapped: %w", sandbox.ErrLost))
	c.add("mount", context.DeadlineExceeded)
	c.wrong("%s", "a rule")
	want := "3 in all, 1 promises broken\nmount             1 OK  1 deadline  1 lost\n"
	if got := c.String(); got != want {
		t.Errorf("\nwant %q\ngot  %q", want, got)
	}
}
