package experiments

import (
	"context"
	"errors"
	"os"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// The mount points of filesystems that are mounted without the agent.
const byHandPath, sharedPath = "/mnt/by-hand", "/mnt/shared"

// twoWays is an ext4 on one device that is mounted in two ways: by the agent, or by a plain
// mount(2).
type twoWays struct {
	guest  *vm.Guest
	volume *vm.Volume
	device string // its /dev name
}

// openTwoWays attaches a new disk with an image in a folder of the host, makes the agent mount it,
// and prepares it with fill.
func (l *Setup) openTwoWays(ctx context.Context, folder, id string, bytes int64, fill func(context.Context, string) error) (*twoWays, error) {
	guest, err := l.theGuest(ctx)
	if err != nil {
		return nil, err
	}
	image, err := vm.Scratch(ctx, folder, "ext4", bytes)
	if err != nil {
		return nil, err
	}
	// The mount option noinit_itable stops the kernel thread that writes inode tables. Otherwise
	// the thread would continue in one way where it stopped in the other.
	w := &twoWays{guest: guest, volume: guest.Take(sandbox.Volume{ID: id, Path: image, FSType: "ext4", Options: []string{"noinit_itable"}})}
	err = w.byAgent(ctx, func(path string) (err error) {
		if w.device, err = guest.MountedDevice(ctx, path); err != nil {
			return err
		}
		return errors.Join(guest.Remote.Mkdir(ctx, byHandPath, 0o755), fill(ctx, path))
	})
	if err != nil {
		return nil, errors.Join(err, w.close(ctx))
	}
	return w, nil
}

// byAgent calls do with the path where the agent has mounted the volume, after the agent's first
// look at it.
func (w *twoWays) byAgent(ctx context.Context, do func(path string) error) error {
	if err := w.volume.Mount(ctx); err != nil {
		return err
	}
	_, err := w.volume.Stats(ctx)
	if err == nil {
		err = do(w.volume.GuestPath)
	}
	return errors.Join(err, w.volume.Unmount(ctx))
}

// byHand calls do with the path of a plain mount with the same options, which the agent does not
// watch.
func (w *twoWays) byHand(ctx context.Context, do func(path string) error) error {
	if err := w.guest.Remote.Mount(ctx, remote.Mount{Source: w.device, Target: byHandPath, FSType: "ext4", Data: "noinit_itable"}); err != nil {
		return err
	}
	return errors.Join(do(byHandPath), w.guest.Remote.Unmount(ctx, byHandPath, 0))
}

func (w *twoWays) close(ctx context.Context) error {
	return errors.Join(w.volume.Detach(ctx), os.Remove(w.volume.Path))
}
