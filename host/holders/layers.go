package holders

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Layer is an object that contains a disk's bytes: the disk itself, the disk of which it is a
// partition, the file or device below a loop device, and so on downwards.
type Layer struct {
	// Key identifies the object on this host by device number or inode, never by a path. It is
	// valid as a file name.
	Key string
	// Part is true if the disk may be only a part of this object.
	Part bool
}

// maxLayers limits how many layers below a disk are followed. A disk on more layers is refused. The
// kernel allows no cycle of loop devices.
const maxLayers = 16

// Layers returns the layers of an open disk, the disk itself first, and whether the disk is a block
// device.
func Layers(file *os.File) (layers []Layer, block bool, err error) {
	st, err := statx(int(file.Fd()), "", unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, false, &os.PathError{Op: "statx", Path: file.Name(), Err: err}
	}
	id, ok := identityOf(st)
	if !ok {
		return nil, false, fmt.Errorf("%s is %s: a disk is an image file or a block device", file.Name(), kindOf(st.Mode))
	}
	block = id.inode == 0
	for part := false; ; {
		layers = append(layers, Layer{id.key(), part})
		below, isPart, ok := id.below()
		if !ok {
			return layers, block, nil
		}
		if len(layers) == maxLayers {
			return nil, block, fmt.Errorf("%s is a loop device on another loop device, for %d layers, so the lowest store may belong to another disk too: remove some of the layers", file.Name(), maxLayers)
		}
		id, part = below, part || isPart
	}
}

func (id identity) key() string {
	major, minor := unix.Major(id.device), unix.Minor(id.device)
	if id.inode == 0 {
		return fmt.Sprintf("block-%d:%d", major, minor)
	}
	return fmt.Sprintf("file-%d:%d-%d", major, minor, id.inode)
}

// below returns the object that contains a block device's bytes: a partition's disk or a loop
// device's store.
func (id identity) below() (below identity, part, ok bool) {
	if id.inode != 0 {
		return identity{}, false, false
	}
	dir := resolved(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(id.device), unix.Minor(id.device)))
	if _, err := os.Stat(dir + "/partition"); err == nil {
		below, err := deviceIn(filepath.Dir(dir))
		return below, true, err == nil
	}
	below, _, err := loopStore(filepath.Base(dir))
	return below, false, err == nil
}

// Locked returns the holder of a lock on an open disk, or nil if no process has locked it. QEMU
// locks bytes of each image that it uses.
func Locked(file *os.File) (*Holder, error) {
	lock := unix.Flock_t{Type: unix.F_WRLCK} // of the whole file, because other programs lock other bytes than QEMU
	if err := unix.FcntlFlock(file.Fd(), unix.F_OFD_GETLK, &lock); err != nil {
		return nil, fmt.Errorf("look for locks on disk %s: %w", file.Name(), err)
	}
	switch {
	case lock.Type == unix.F_UNLCK:
		return nil, nil
	case lock.Start >= firstLock && lock.Start < afterLocks:
		return &Holder{How: fmt.Sprintf("a process holds QEMU's image lock on it (byte %d)", lock.Start)}, nil
	case lock.Pid > 0:
		return &Holder{PID: int(lock.Pid), Program: programOf(int(lock.Pid)), How: "has locked it"}, nil
	default:
		return &Holder{How: "a process has locked it"}, nil
	}
}
