package churn

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/host/sandbox/promises"
	"github.com/directvol/directvol/protocols/guestpath"
	"github.com/directvol/directvol/tests/vm"
)

const (
	miB = 1 << 20
	// Each volume is stepBytes larger than the previous one, so that statistics show whose they
	// are. A volume grows by at most grownBytes.
	firstBytes, stepBytes, grownBytes = 40 * miB, 8 * miB, 4 * miB
	// nameFile is the file with the volume's name.
	nameFile = "name"
)

// patience are the deadlines of the callers: most are too short, like a kubelet's.
var patience = []time.Duration{20 * time.Millisecond, 200 * time.Millisecond, time.Second, 5 * time.Second, patient, patient}

// patient is a deadline within which an undisturbed call must succeed, as a base for vm.Limit.
const patient = 30 * time.Second

// volume is one of many volumes.
type volume struct {
	*vm.Volume
	bytes uint64 // the size of the new disk
	total uint64 // the size of its new filesystem, according to its statistics
}

// churn is a guest and its callers.
type churn struct {
	guest   *vm.Guest
	volumes []*volume
	ledger  promises.Ledger
	count   count
}

// call makes a random call of a random volume.
func (c *churn) call(ctx context.Context, v *volume) {
	limit := patience[rand.IntN(len(patience))]
	mustWork := limit == patient
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(limit))
	defer cancel()
	s := c.guest.Sandbox
	switch rand.IntN(10) {
	case 0, 1:
		c.change(promises.Attach, v, mustWork, func() error { return s.Attach(ctx, v.Volume.Volume) })
	case 2, 3, 4:
		c.change(promises.Mount, v, mustWork, func() error { _, err := s.Mount(ctx, v.ID); return err })
	case 5:
		c.change(promises.Unmount, v, mustWork, func() error { return s.Unmount(ctx, v.ID) })
	case 6, 7:
		c.change(promises.Detach, v, mustWork, func() error { return s.Detach(ctx, v.ID) })
	case 8:
		c.count.add("stats", c.stats(ctx, v))
	case 9:
		c.count.add("resize", s.Resize(ctx, v.ID, v.bytes+uint64(rand.IntN(grownBytes/miB)+1)*miB))
	}
}

// change makes a call that changes a volume. The call must succeed if it has enough time, and if
// neither another call of the volume nor the volume's state prevents it.
func (c *churn) change(verb promises.Verb, v *volume, mustWork bool, do func() error) {
	before := c.ledger.Of(v.ID)
	end := c.ledger.Begin(verb, v.ID)
	err := do()
	now := c.ledger.Of(v.ID)
	end(err)
	c.count.add(verb.String(), err)
	alone := before.Calm && now.IsNext(before)
	may := verb == promises.Attach || verb == promises.Detach || before.Made && before.State != sandbox.Absent
	if err != nil && mustWork && alone && may {
		c.count.wrong("%v failed, and nothing hindered it: %v", verb, err)
	}
	if errors.Is(err, sandbox.ErrLost) {
		c.count.wrong("a disk left by itself: %v", err)
	}
}

// stats asks for statistics, and checks that they are of this volume.
func (c *churn) stats(ctx context.Context, v *volume) error {
	stats, err := c.guest.Sandbox.Stats(ctx, v.ID)
	if err != nil {
		return err
	}
	if total := stats.Usage[0].Total; total < v.total || total >= v.total+stepBytes-miB {
		c.count.wrong("statistics of %s: %d bytes in all, of a volume that had %d", v.ID, total, v.total)
	}
	return nil
}

// look compares a promise with the real state, if there is a promise and no call interferes.
func (c *churn) look(ctx context.Context, v *volume) {
	promise := c.ledger.Of(v.ID)
	if !promise.Made || !promise.Calm {
		return
	}
	err := c.isSo(ctx, v, promise.State)
	if c.ledger.Of(v.ID) != promise || ctx.Err() != nil {
		return // another call interfered
	}
	c.count.add("look at "+promise.State.String(), nil)
	if err != nil {
		c.count.wrong("%s was promised to be %v: %v", v.ID, promise.State, err)
	}
}

func (c *churn) isSo(ctx context.Context, v *volume, state sandbox.State) error {
	disk, there := c.guest.VM().Disk(v.DiskID())
	if there != (state != sandbox.Absent) {
		return fmt.Errorf("the machine has its disk: %v", there)
	}
	if state != sandbox.Mounted {
		return nil
	}
	point, err := guestpath.Of(disk.PCIPath)
	if err != nil {
		return err
	}
	name, err := c.guest.Remote.ReadFile(ctx, point+"/"+nameFile)
	if err == nil && string(name) != v.ID {
		err = fmt.Errorf("%s holds volume %q", point, name)
	}
	return err
}

// volumeCaller makes calls of one volume until ctx ends, and looks at the volume between its calls.
func (c *churn) volumeCaller(ctx context.Context, v *volume) {
	for ctx.Err() == nil {
		c.call(context.WithoutCancel(ctx), v)
		c.look(ctx, v)
	}
}

// intruder makes calls of any volume until ctx ends, concurrently with the other callers.
func (c *churn) intruder(ctx context.Context) {
	for ctx.Err() == nil {
		c.call(context.WithoutCancel(ctx), c.volumes[rand.IntN(len(c.volumes))])
	}
}

// kind returns the kind under which a failure is counted.
func kind(err error) string {
	if err == nil {
		return "OK"
	}
	for _, k := range []struct {
		is   error
		name string
	}{
		{sandbox.ErrHotplugHeld, "hotplug held"}, {sandbox.ErrLost, "lost"}, {sandbox.ErrStoreHangs, "store hangs"}, {sandbox.ErrNotFound, "not found"},
		{sandbox.ErrWouldShrink, "would shrink"}, {sandbox.ErrBusy, "busy"}, {sandbox.ErrOutcomeUnknown, "outcome unknown"}, {sandbox.ErrInfeasible, "infeasible"},
		{context.DeadlineExceeded, "deadline"},
	} {
		if errors.Is(err, k.is) {
			return k.name
		}
	}
	text := err.Error()
	return "other: " + strings.ReplaceAll(text[:min(len(text), 200)], "\n", " ")
}
