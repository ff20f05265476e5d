package experiments

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/vm"
)

// disk is a scratch disk of the guest whose image lies in the host's memory, where it can: what is measured with it is not how fast this host's disk is.
type disk struct {
	sandbox.Volume
	guest     *vm.Guest
	GuestPath string // where it is mounted
}

// newDisk formats a disk. It is attached to nothing yet.
func (l *Setup) newDisk(ctx context.Context, guest *vm.Guest, id, fstype string, bytes uint64, options ...string) (*disk, error) {
	image, err := vm.Scratch(ctx, l.memory, fstype, int64(bytes))
	if err != nil {
		return nil, err
	}
	return &disk{Volume: sandbox.Volume{ID: id, Path: image, FSType: fstype, Options: options}, guest: guest}, nil
}

// diskBytes is the size of a disk that nothing much is done with.
const diskBytes = 64 << 20

// mountedDisk is one that the agent has mounted.
func (l *Setup) mountedDisk(ctx context.Context, guest *vm.Guest) (*disk, error) {
	d, err := l.newDisk(ctx, guest, "volume", "ext4", diskBytes)
	if err != nil {
		return nil, err
	}
	if err := d.attach(ctx); err != nil {
		return nil, err
	}
	return d, d.mount(ctx)
}

// attach gives the guest the disk, mount has the agent mount it.
func (d *disk) attach(ctx context.Context) error { return d.guest.Attach(ctx, d.Volume) }

func (d *disk) mount(ctx context.Context) (err error) {
	d.GuestPath, err = d.guest.Mount(ctx, d.ID)
	return err
}

// remove takes the disk away, where it is attached, and its image.
func (d *disk) remove(ctx context.Context) error {
	return errors.Join(d.guest.Detach(ctx, d.ID), os.Remove(d.Path))
}

// memoryFolder makes a folder in memory, or, where there is no such filesystem, below dir.
func memoryFolder(dir string) (string, error) {
	const memory = "/dev/shm" // as shm_overview(7) has it
	var st unix.Statfs_t
	if unix.Statfs(memory, &st) == nil && st.Type == unix.TMPFS_MAGIC {
		if folder, err := os.MkdirTemp(memory, "directvol-bench-"); err == nil {
			return folder, nil
		}
	}
	return os.MkdirTemp(dir, "disks-")
}
