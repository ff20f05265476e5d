package volume

import (
	"errors"

	"github.com/moby/sys/mountinfo"
)

// MountsAt returns what is mounted at a path that holds no symbolic link, in the
// order in which it was mounted: the last one hides the others. There is none
// where nothing is mounted.
func MountsAt(path string) ([]*mountinfo.Info, error) { return mountinfo.GetMounts(stackAt(path)) }

// stackAt keeps every mount at a path. mountinfo's SingleEntryFilter ends with
// the first, which the others hide.
func stackAt(path string) mountinfo.FilterFunc {
	return func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != path, false }
}

// pick returns the entry with an id, or the topmost of those at a path.
func pick(mounts []*mountinfo.Info, mountID int) (*mountinfo.Info, error) {
	for i := len(mounts) - 1; i >= 0; i-- {
		if mountID == unknownMount || mounts[i].ID == mountID {
			return mounts[i], nil
		}
	}
	return nil, errors.New("nothing is mounted there any more")
}
