package volume

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/refusal"
)

// Freeze names a volume that the agent may have frozen for a moment.
type Freeze struct {
	MountPoint string `json:"mount_point"`
	MountID    int    `json:"mount_id"`
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
	key := Freeze{v.Mountpoint, v.mountID, v.Device.Number}
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
// where it is still the one that is mounted there.
func ThawLeft(f Freeze) error {
	dir, err := os.OpenFile(f.MountPoint, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	var st unix.Statx_t
	if err := unix.Statx(int(dir.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return &os.PathError{Op: "statx", Path: f.MountPoint, Err: err}
	}
	if unix.Mkdev(st.Dev_major, st.Dev_minor) != f.Device || f.MountID > 0 && int(st.Mnt_id) != f.MountID {
		return refusal.New(refusal.NotFound, "volume %s: another one is mounted there now", f.MountPoint)
	}
	if err := filesystem.Thaw(dir); err != nil {
		return fmt.Errorf("volume %s: %w", f.MountPoint, err)
	}
	return nil
}
