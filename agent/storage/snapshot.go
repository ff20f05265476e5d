package storage

import (
	"fmt"
	"maps"
	"slices"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/state"
)

// stateVersion counts what was added to the contents of the state file. Any version is
// read as far as its fields are known, and keeps the others.
const stateVersion = 2

// snapshot is what the state file holds: who holds what. The kernel knows what is mounted,
// and not for whom. A storage is written down before it is mounted and struck out after it
// is unmounted, so that whenever the agent is killed, no mount is missing in it.
type snapshot struct {
	state.Header
	Destroyed bool     `json:"sandbox_destroyed,omitempty"`
	Heard     uint64   `json:"kernel_log,omitempty"` // the last record whose meaning is in Past
	Storages  []record `json:"storages"`

	more state.Rest
}

// record is a storage, and what it takes to find it in mountinfo.
type record struct {
	Driver     string      `json:"driver"`
	Source     string      `json:"source"`
	FSType     string      `json:"fstype,omitempty"`
	Flags      uintptr     `json:"flags,omitempty"` // of mount(2)
	Data       string      `json:"data,omitempty"`
	MountPoint string      `json:"mount_point"`
	Made       bool        `json:"made,omitempty"` // the mount point is ours to remove
	Device     string      `json:"device"`
	Number     uint64      `json:"number,omitempty"`  // dev_t
	Seq        uint64      `json:"diskseq,omitempty"` // of the disk with that number; since version 2
	Holders    []string    `json:"holders"`
	MountID    int         `json:"mount_id,omitempty"` // of Mount, for agents of version 1
	Past       health.Past `json:"past,omitzero"`

	// Mount is the mount that was made, and that Past is about. A later version may
	// know more of it, and goes by as much as is there; since version 2.
	Mount mount.Identity `json:"mount,omitzero"`

	more state.Rest
}

// snapshot is everything as it is now.
func (t *Table) snapshot() snapshot {
	t.mu.Lock()
	defer t.mu.Unlock()
	// Heard first: what is heard meanwhile is heard twice then, and not never.
	now := t.past
	now.Header = t.state.Header(max(now.Version, stateVersion))
	now.Destroyed, now.Heard, now.Storages = t.ended, t.volumes.Heard(), []record{}
	for _, s := range t.strangers {
		now.Storages = append(now.Storages, s.record)
	}
	all := maps.Clone(t.intents)
	maps.Copy(all, t.mounts)
	for _, mountPoint := range slices.Sorted(maps.Keys(all)) {
		of, past := t.volumes.Past(mountPoint)
		now.Storages = append(now.Storages, recordOf(all[mountPoint], of, past))
	}
	return now
}

// recordOf is a storage as it is written down.
func recordOf(m *mounted, of mount.Identity, past health.Past) record {
	if !of.Same(m.mount()) { // somebody has mounted something there meanwhile
		past = health.Past{}
	}
	return record{
		Driver: m.driver.name, Source: m.source, FSType: m.fstype, Flags: m.options.Flags, Data: m.options.Data,
		MountPoint: m.mountPoint, Made: m.made, Device: m.origin().path, Number: m.origin().device.Number, Seq: m.origin().device.Seq,
		Holders: m.heldOrNeeded(), MountID: m.mount().ID, Mount: m.mount(), Past: past, more: m.more,
	}
}

// identity is of the mount that Past is about, as far as the record's version knows it.
func (r record) identity() mount.Identity {
	if r.Mount.IsMount() || r.MountID == 0 {
		return r.Mount
	}
	return mount.Identity{ID: r.MountID, FSType: r.FSType, Number: r.Number}
}

// heldOrNeeded are a storage's holders, and those that calls under way would add:
// where the agent ends now, the next one takes these for holders.
func (m *mounted) heldOrNeeded() []string {
	all := maps.Clone(m.holders)
	for _, holder := range m.calls {
		all[holder] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// mounted is recordOf's inverse. A record that no agent can have written is
// refused: what it names would be unmounted one day.
func (r record) mounted() (*mounted, error) {
	m := &mounted{
		request: request{driver: driverOf(r.Driver), source: r.Source, fstype: r.FSType, options: mount.Options{Flags: r.Flags, Data: r.Data}, mountPoint: r.MountPoint},
		from:    origin{r.Device, mount.Device{Number: r.Number, Seq: r.Seq}}, made: r.Made, holders: map[string]bool{}, calls: map[*call]string{}, more: r.more, identity: r.identity(),
	}
	if m.driver == nil {
		return nil, fmt.Errorf("storage %.200q: unknown driver %.40q", r.MountPoint, r.Driver)
	}
	if !mount.IsPoint(r.MountPoint) {
		return nil, fmt.Errorf("storage %.200q: no absolute path below /", r.MountPoint)
	}
	if len(r.Holders) == 0 {
		return nil, fmt.Errorf("storage %.200q: held by %q", r.MountPoint, r.Holders)
	}
	for _, holder := range r.Holders {
		m.holders[holder] = true
	}
	return m, m.driver.check(m.request)
}

// The known fields alone, so that the methods below do not call themselves.
type (
	knownSnapshot snapshot
	knownRecord   record
)

func (s *snapshot) UnmarshalJSON(text []byte) (err error) {
	s.more, err = state.Split(text, (*knownSnapshot)(s))
	return err
}

func (s snapshot) MarshalJSON() ([]byte, error) { return state.Unite(knownSnapshot(s), s.more) }

func (r *record) UnmarshalJSON(text []byte) (err error) {
	r.more, err = state.Split(text, (*knownRecord)(r))
	return err
}

func (r record) MarshalJSON() ([]byte, error) { return state.Unite(knownRecord(r), r.more) }
