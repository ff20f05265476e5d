package storage

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/refusal"
)

// devices are the block devices below storages, one mount of each at a time.
type devices struct {
	turns turns

	mu sync.Mutex
	// unproven are the devices (dev_t) whose first mount could not be undone. They
	// are not mounted again while it lives.
	unproven map[uint64]bool
}

// mount mounts an origin, and once more where the first mount has replayed a log
// with a growth in it: the kernel has counted the groups before, and the next
// growth would go by that. A growth was replayed if the mounted size differs from
// the superblock's size before.
func (d *devices) mount(r request, from origin) error {
	mount := func() error { return unix.Mount(from.path, r.mountPoint, r.fstype, r.flags, r.data) }
	fstype, ok := filesystem.Lookup(r.fstype)
	if !ok {
		return mount()
	}
	done, err := d.turns.take(context.Background(), from.path)
	if err != nil {
		return err
	}
	defer done()
	fstype.BeforeMount()
	before, known := endOnDisk(fstype, from)
	err = mount()
	if errors.Is(err, unix.EUCLEAN) && known {
		// An xfs recovery that failed on groups beyond the filesystem's end has
		// written the superblock that has them, if that was before them in the
		// log: the next one goes by it.
		if now, _ := endOnDisk(fstype, from); now > before {
			before, err = now, mount()
		}
	}
	if err != nil || !known {
		return err
	}
	if after, known := endMounted(fstype, r.mountPoint, from); !known || after == before {
		return nil
	}
	if err := d.letGo(r, from); err != nil {
		return err
	}
	return mount()
}

// letGo unmounts what has just been mounted, and proves that the kernel has let
// go of the disk: mounted elsewhere, it would be counted with as it is.
func (d *devices) letGo(r request, from origin) error {
	err := unix.Unmount(r.mountPoint, unix.UMOUNT_NOFOLLOW)
	if err != nil { // not left there: the call is refused, and nobody would hold it
		unix.Unmount(r.mountPoint, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
	} else if disk, openErr := claim(from.path); openErr == nil {
		return disk.Close()
	} else {
		err = openErr
	}
	d.setUnproven(from.number, true)
	return d.refuseUnproven(from, err)
}

func (d *devices) refuseUnproven(from origin, err error) error {
	return refusal.New(refusal.FailedPrecondition, "%s was cut off while it grew, so it has to be mounted twice, and the first mount lives on: somebody in the guest is in it: end that and try again, or detach the disk: %w", from.path, err)
}

func (d *devices) setUnproven(number uint64, on bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.unproven == nil {
		d.unproven = map[uint64]bool{}
	}
	if delete(d.unproven, number); on {
		d.unproven[number] = true
	}
}

// allUnproven are written down, for the agent after this one.
func (d *devices) allUnproven() []uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(maps.Keys(d.unproven))
}

// proven refuses a device of which an unproven mount lives on.
func (d *devices) proven(from origin) error {
	d.mu.Lock()
	suspect := d.unproven[from.number]
	d.mu.Unlock()
	if !suspect {
		return nil
	}
	disk, err := claim(from.path)
	if errors.Is(err, unix.EBUSY) {
		return d.refuseUnproven(from, err)
	}
	if err == nil {
		disk.Close()
		d.setUnproven(from.number, false)
	}
	return nil // mount(2) says what else is wrong
}

// claim opens a block device that is mounted nowhere.
func claim(path string) (*os.File, error) { return os.OpenFile(path, os.O_RDONLY|unix.O_EXCL, 0) }

// endOnDisk is where the superblock on a disk has the filesystem end. It is not
// known of one that is mounted already: nothing is replayed then.
func endOnDisk(fstype filesystem.Type, from origin) (blocks uint64, known bool) {
	disk, err := claim(from.path)
	if err != nil {
		return 0, false // mount(2) says what is wrong
	}
	defer disk.Close()
	blocks, err = fstype.EndOnDisk(disk)
	return blocks, err == nil // what is no such filesystem mount(2) refuses
}

// endMounted is where the filesystem ends that has just been mounted.
func endMounted(fstype filesystem.Type, mountPoint string, from origin) (blocks uint64, known bool) {
	dir, err := os.OpenFile(mountPoint, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return 0, false
	}
	defer dir.Close()
	disk, err := os.Open(from.path)
	if err != nil {
		return 0, false
	}
	defer disk.Close()
	geometry, err := fstype.Geometry(filesystem.Mounted{Dir: dir, Disk: disk})
	return geometry.Blocks, err == nil
}
