package experiments

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

// attachments is the number of disks that one run attaches.
const attachments = 3

var attach = experiment{
	name: "attach a disk and mount it, by phase",
	lines: []measure.Line{
		{Name: "attach_to_mounted", Unit: "ms", What: "from QMP's answer to device_add to the agent's answer that the ext4 is mounted"},
		{Name: "attach_device", Unit: "ms", What: "the part of it until the guest has the block device: the time of mounting beyond the next row"},
		{Name: "attach_mount", Unit: "ms", What: "the part of it for mounting: the same call for a device that the guest already has"},
		{Name: "attach_qmp", Unit: "ms", What: "QMP's part before it: two blockdev-add and device_add"},
	},
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		guest, err := l.theGuest(ctx)
		if err != nil {
			return measure.Session{}, err
		}
		return measure.Session{Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			t := measure.Trial{}
			for i := range attachments {
				say(fmt.Sprintf("disk %d of %d", i+1, attachments))
				if err := l.attachOnce(ctx, guest, t); err != nil {
					return nil, err
				}
			}
			return t, nil
		}}, nil
	},
}

// attachOnce attaches one disk, and adds the time of each phase to a trial.
func (l *Setup) attachOnce(ctx context.Context, guest *vm.Guest, t measure.Trial) (err error) {
	d, err := l.newDisk(ctx, guest, "attached", "ext4", diskBytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.remove(ctx)) }()
	qmp, err := timed(func() error { return d.attach(ctx) })
	if err != nil {
		return err
	}
	mounted, err := timed(func() error { return d.mount(ctx) })
	if err != nil {
		return err
	}
	if err := guest.Unmount(ctx, d.ID); err != nil {
		return err
	}
	again, err := timed(func() error { return d.mount(ctx) })
	if err != nil {
		return err
	}
	for name, took := range map[string]time.Duration{"attach_qmp": qmp, "attach_to_mounted": mounted, "attach_mount": again, "attach_device": mounted - again} {
		t[name] = append(t[name], milliseconds(took))
	}
	return nil
}

func timed(do func() error) (time.Duration, error) {
	began := time.Now()
	err := do()
	return time.Since(began), err
}
