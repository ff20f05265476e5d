package experiments

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/vm"
)

// disk is a scratch disk of the guest. If possible, its image lies in the host's memory, so that
// the speed of the host's disk does not matter.
type disk struct {
	sandbox.Volume
	guest     *vm.Guest
	GuestPath string // the mount point
}

// newDisk formats a disk and does not attach it.
func (l *Setup) newDisk(ctx context.Context, guest *vm.Guest, id, fstype string, bytes uint64, options ...string) (*disk, error) {
	image, err := vm.Scratch(ctx, l.memory, fstype, int64(bytes))
	if err != nil {
		return nil, err
	}
	return &disk{Volume: sandbox.Volume{ID: id, Path: image, FSType: fstype, Options: options}, guest: guest}, nil
}

// diskBytes is the size of a disk that is hardly used.
const diskBytes = 64 << 20

// mountedDisk returns a disk that the agent has mounted.
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

// attach gives the guest the disk; mount makes the agent mount it.
func (d *disk) attach(ctx context.Context) error { return d.guest.Attach(ctx, d.Volume) }

func (d *disk) mount(ctx context.Context) (err error) {
	d.GuestPath, err = d.guest.Mount(ctx, d.ID)
	return err
}

// remove detaches the disk if it is attached, and removes its image.
func (d *disk) remove(ctx context.Context) error {
	return errors.Join(d.guest.Detach(ctx, d.ID), os.Remove(d.Path))
}

// memory is a filesystem in the host's memory, see shm_overview(7).
const memory = "/dev/shm"

// memoryFolder makes a folder in memory, or below dir if there is no filesystem in memory.
func memoryFolder(dir string) (folder string, inMemory bool, err error) {
	var st unix.Statfs_t
	if unix.Statfs(memory, &st) == nil && st.Type == unix.TMPFS_MAGIC {
		if folder, err := os.MkdirTemp(memory, "directvol-bench-"); err == nil {
			return folder, true, nil
		}
	}
	folder, err = os.MkdirTemp(dir, "disks-")
	return folder, false, err
}
