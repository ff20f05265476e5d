package holders

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Layer is something that holds a disk's bytes: the disk itself, the disk that it is a partition of, the file or device that it
// is a loop device over, and so on downwards.
type Layer struct {
	// Key names it on this host, by device number or inode, and never by a path. It is fit for a file's name.
	Key string
	// Part is set where the disk may be only some of its bytes.
	Part bool
}

// maxLayers ends a search for what loop devices lie on, which is refused then: the kernel allows no ring of them.
const maxLayers = 16

// Layers returns what holds an open disk's bytes, the disk itself first, and whether it is a block device.
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
			return nil, block, fmt.Errorf("%s is a loop device over another one, and so on for %d layers: what lies below could be another disk's too: take some away", file.Name(), maxLayers)
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

// below returns what a block device's bytes are in, where that is a partition's disk or a loop device's store.
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

// Locked returns who has a lock of any process on an open disk, nil where nobody has: QEMU locks bytes of each image that it uses.
func Locked(file *os.File) (*Holder, error) {
	lock := unix.Flock_t{Type: unix.F_WRLCK} // of the whole file: this is not QEMU's alone
	if err := unix.FcntlFlock(file.Fd(), unix.F_OFD_GETLK, &lock); err != nil {
		return nil, fmt.Errorf("look for locks on disk %s: %w", file.Name(), err)
	}
	switch {
	case lock.Type == unix.F_UNLCK:
		return nil, nil
	case lock.Start >= firstLock && lock.Start < afterLocks:
		return &Holder{How: fmt.Sprintf("somebody holds QEMU's image lock on it (byte %d)", lock.Start)}, nil
	case lock.Pid > 0:
		return &Holder{PID: int(lock.Pid), Program: programOf(int(lock.Pid)), How: "has locked it"}, nil
	default:
		return &Holder{How: "somebody has locked it"}, nil
	}
}
