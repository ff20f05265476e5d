package volume

import (
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/refusal"
)

// Freeze names a volume that the agent may have frozen for a moment.
type Freeze struct {
	MountPoint string `json:"mount_point"`
	Device     uint64 `json:"device"` // dev_t
}

// freezes are the growths under way that freeze their volume. The kernel does
// not thaw it when the agent is killed meanwhile: so each is written down first,
// for the agent after this one.
type freezes struct {
	mu   sync.Mutex
	now  map[Freeze]bool
	save func() error // nil where nothing is kept
}

// KeepFreezes has save called whenever Freezes has changed. It goes before any
// call.
func (t *Table) KeepFreezes(save func() error) { t.freezes.save = save }

// Freezes returns the volumes that may be frozen now, in the order of their
// mount points.
func (t *Table) Freezes() []Freeze {
	t.freezes.mu.Lock()
	defer t.freezes.mu.Unlock()
	return slices.SortedFunc(maps.Keys(t.freezes.now), func(a, b Freeze) int { return strings.Compare(a.MountPoint, b.MountPoint) })
}

func (f *freezes) begin(v *Volume) error {
	err := f.set(v, true)
	if err != nil {
		f.end(v)
	}
	return err
}

// end strikes a growth out. Where that cannot be written, a later agent thaws
// what is not frozen, which changes nothing.
func (f *freezes) end(v *Volume) { _ = f.set(v, false) }

func (f *freezes) set(v *Volume, on bool) error {
	key := Freeze{v.Mountpoint, v.Device.Number}
	f.mu.Lock()
	if f.now == nil {
		f.now = map[Freeze]bool{}
	}
	if on {
		f.now[key] = true
	} else {
		delete(f.now, key)
	}
	f.mu.Unlock()
	if f.save == nil {
		return nil
	}
	return f.save()
}

// ThawLeft thaws a volume that an agent before this one may have left frozen,
// by whichever of its mounts leads to it.
func ThawLeft(f Freeze) error {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return unix.Mkdev(uint32(m.Major), uint32(m.Minor)) != f.Device, false
	})
	if err != nil {
		return err
	}
	err = refusal.New(refusal.NotFound, "volume %s: it is not mounted any more", f.MountPoint)
	for _, m := range mounts {
		if err = thawAt(m.Mountpoint, f.Device); err == nil {
			return nil
		}
	}
	return err
}

// thawAt thaws what is mounted at a path, where it is the device's.
func thawAt(path string, device uint64) error {
	dir, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return &os.PathError{Op: "fstat", Path: path, Err: err}
	}
	if st.Dev != device {
		return refusal.New(refusal.NotFound, "volume %s: something else hides it", path)
	}
	return filesystem.Thaw(dir)
}
