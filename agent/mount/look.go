package mount

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Errors of Look.
var (
	// ErrNotExist means that the path does not exist.
	ErrNotExist = errors.New("it does not exist")
	// ErrNoMount means that nothing is mounted at the path.
	ErrNoMount = errors.New("nothing is mounted there")
	// ErrUnknown means that the root cannot be examined, for instance that of an xfs that has shut
	// down, or on a kernel before 5.8. mountinfo has the answer then.
	ErrUnknown = errors.New("its root cannot be examined")
)

// Mark identifies a mount with what the kernel can report without blocking. It is unique for this
// boot or, before Linux 6.8, unique among the current mounts.
type Mark struct {
	unique uint64
	id     int
}

// Look returns the mark of the topmost mount at a path. It requests nothing for which a filesystem
// would ask a disk or a server.
func Look(path string) (Mark, error) {
	st, err := statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENAMETOOLONG):
		return Mark{}, ErrNotExist
	case err != nil, st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0:
		return Mark{}, ErrUnknown
	case st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0:
		return Mark{}, ErrNoMount
	}
	return markOf(st), nil
}

// Has reports whether an open file belongs to the mount. It fails if the file cannot be examined,
// for instance with the EIO of an xfs that has shut down.
func (i Identity) Has(file *os.File) (bool, error) {
	st, err := statx(int(file.Fd()), "", unix.AT_EMPTY_PATH)
	if err != nil {
		return false, &fs.PathError{Op: "statx", Path: file.Name(), Err: err}
	}
	return i.Bears(markOf(st)), nil
}

// Bears reports whether a mark is still this mount's. If the kernel reuses marks, Bears also checks
// that the superblock is the same.
func (i Identity) Bears(mark Mark) bool {
	if mark.unique != 0 && i.Unique != 0 {
		return mark.unique == i.Unique
	}
	return mark.id != 0 && mark.id == i.ID && i.superStands()
}

// superStands reports whether nothing shows that the superblock has been replaced. It does not
// check a tmpfs; its statfs is checked by the caller that measures it.
func (i Identity) superStands() bool {
	if i.Super == 0 || i.FSType == "tmpfs" {
		return true
	}
	folder := i.folder
	if folder == "" {
		folder = i.superFolder("/")
	}
	return folder == "" || inodeOf(folder) == i.Super
}

// statx requests only the mount's number.
func statx(dir int, path string, flags int) (unix.Statx_t, error) {
	var st unix.Statx_t
	err := unix.Statx(dir, path, flags|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID|unix.STATX_MNT_ID_UNIQUE, &st)
	return st, err
}

func markOf(st unix.Statx_t) Mark {
	if st.Mask&unix.STATX_MNT_ID_UNIQUE != 0 {
		return Mark{unique: st.Mnt_id}
	}
	return Mark{id: int(st.Mnt_id)}
}
