package cuts

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/vm"
)

// loss is a kind of failure of a volume after a cut.
type loss string

const (
	metWindow loss = "met the window" // the mount was refused because the log is ahead of the superblock, or of metadata that belongs to it
	refused   loss = "mount refused"
	blocks    loss = "blocks lost"
	noGrowth  loss = "growth failed"
	unclean   loss = "fsck not silent"
	hung      loss = "guest hung" // in the kernel: a call did not return
	duringUse loss = "growth failed before the cut"
)

// finding is a loss, with the message.
type finding struct {
	loss
	err error
}

// check mounts the volume that a cut has left, compares its blocks, grows it again, and runs fsck.
// It returns an error only for a failure of the test itself or if ctx has ended.
func (r *remains) check(ctx context.Context, g *vm.Guest, w way, id string) (found []finding, err error) {
	d := &disk{way: w, guest: g, id: id, fstype: r.fstype, path: r.path, kept: r.kept}
	if err := d.attach(ctx); err != nil {
		return nil, err
	}
	if err := d.mount(ctx); err != nil {
		return []finding{{r.refusal(err), err}}, d.detach(ctx)
	}
	add := func(l loss, err error) {
		if err != nil {
			found = append(found, finding{l, err})
		}
	}
	if r.ledger.Blocks() > 0 {
		all, err := g.Remote.Verify(ctx, d.mounted+"/"+written, r.ledger, nil)
		add(blocks, errors.Join(err, all.Err()))
	}
	goal := cmp.Or(r.goal, vm.WholeSize(r.size))
	grown := d.grow(ctx, goal)
	add(noGrowth, grown)
	if ctx.Err() != nil {
		return found, grown
	}
	if err := errors.Join(d.unmount(ctx), d.detach(ctx)); err != nil {
		return found, err
	}
	if grown == nil {
		add(noGrowth, d.isOf(goal))
	}
	fsck, err := vm.Check(ctx, r.fstype, d.checked(r.path))
	if err != nil {
		return found, err
	}
	add(unclean, fsck.Err(r.fstype))
	return found, nil
}

// refusal distinguishes the known refusal of a mount from other refusals.
func (r *remains) refusal(err error) loss {
	// The agent's errors have crossed a wire, so only the errno's text is left. An ext4's or ext3's
	// superblock may already have the new size while the group descriptors do not.
	if (r.window || strings.HasPrefix(r.fstype, "ext") && r.growths > 0) && strings.Contains(err.Error(), unix.EUCLEAN.Error()) {
		return metWindow
	}
	return refused
}

func (d *disk) isOf(want uint64) error {
	got, err := d.end(d.path)
	if err == nil && got != want {
		err = fmt.Errorf("it was grown to %d bytes, and its superblock says %d", want, got)
	}
	return err
}
