package storage

import (
	"fmt"
	"maps"
	"slices"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/state"
)

// stateVersion counts the additions to the contents of the state file. An agent reads any version
// as far as it knows the fields, and keeps the other fields.
const stateVersion = 3

// snapshot is the contents of the state file: the holders of each storage. The kernel knows which
// storages are mounted, but not for whom. A storage is recorded before it is mounted and removed
// after it is unmounted, so that no mount is missing from the file whenever the agent is killed.
type snapshot struct {
	state.Header
	Destroyed bool     `json:"sandbox_destroyed,omitempty"`
	Heard     uint64   `json:"kernel_log,omitempty"` // the last record of the kernel's log that Past accounts for
	Storages  []record `json:"storages"`

	more state.Rest
}

// record is a storage and the data to find it in mountinfo.
type record struct {
	Driver     string      `json:"driver"`
	Source     string      `json:"source"`
	FSType     string      `json:"fstype,omitempty"`
	Flags      uintptr     `json:"flags,omitempty"` // of mount(2)
	Data       string      `json:"data,omitempty"`
	FlagsNow   uintptr     `json:"updated_flags,omitempty"` // since an update; without one, 0 and "". Since version 3.
	DataNow    string      `json:"updated_data,omitempty"`
	MountPoint string      `json:"mount_point"`
	Made       bool        `json:"made,omitempty"` // the agent made the mount point and removes it
	Device     string      `json:"device"`
	Number     uint64      `json:"number,omitempty"`  // dev_t
	Seq        uint64      `json:"diskseq,omitempty"` // of the disk with that number; since version 2
	Holders    []string    `json:"holders"`
	MountID    int         `json:"mount_id,omitempty"` // Mount.ID, for agents of version 1
	Past       health.Past `json:"past,omitzero"`

	// Mount is the mount that was made and that Past describes. A later version may add fields; an
	// agent uses those that are present. Since version 2.
	Mount mount.Identity `json:"mount,omitzero"`

	more state.Rest
}

// snapshot returns the current state.
func (t *Table) snapshot() snapshot {
	t.mu.Lock()
	defer t.mu.Unlock()
	// Heard is read first: a record that arrives meanwhile is then processed twice, not lost.
	now := t.past
	now.Header = t.state.Header(max(now.Version, stateVersion))
	now.Destroyed, now.Heard, now.Storages = t.ended, t.volumes.Heard(), []record{}
	for _, s := range t.strangers {
		now.Storages = append(now.Storages, s.record)
	}
	all := maps.Clone(t.intents)
	maps.Copy(all, t.mounts)
	for _, mountPoint := range slices.Sorted(maps.Keys(all)) {
		m := all[mountPoint]
		now.Storages = append(now.Storages, recordOf(m, t.volumes.Past(mountPoint, m.mount())))
	}
	return now
}

// recordOf returns the record of a storage with what its mount's watch remembers.
func recordOf(m *mounted, past health.Past) record {
	return record{
		Driver: m.driver.name, Source: m.source, FSType: m.fstype, Flags: m.options.Flags, Data: m.options.Data, FlagsNow: m.updated.Flags, DataNow: m.updated.Data,
		MountPoint: m.mountPoint, Made: m.made, Device: m.origin().path, Number: m.origin().device.Number, Seq: m.origin().device.Seq,
		Holders: m.heldOrNeeded(), MountID: m.mount().ID, Mount: m.mount(), Past: past, more: m.more,
	}
}

// identity returns the mount that Past describes, as far as the record's version knows it.
func (r record) identity() mount.Identity {
	if r.Mount.IsMount() || r.MountID == 0 {
		return r.Mount
	}
	return mount.Identity{ID: r.MountID, FSType: r.FSType, Number: r.Number}
}

// heldOrNeeded returns a storage's holders and those that calls in progress would add. If the agent
// ends now, the next agent regards all of them as holders.
func (m *mounted) heldOrNeeded() []string {
	all := maps.Clone(m.holders)
	for _, holder := range m.calls {
		all[holder] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// mounted is the inverse of recordOf. It refuses a record that no agent can have written, because
// the agent would later unmount the path in it.
func (r record) mounted() (*mounted, error) {
	m := &mounted{
		request: request{driver: driverOf(r.Driver), source: r.Source, fstype: r.FSType, options: mount.Options{Flags: r.Flags, Data: r.Data}, mountPoint: r.MountPoint},
		from:    origin{r.Device, mount.Device{Number: r.Number, Seq: r.Seq}}, made: r.Made, updated: mount.Options{Flags: r.FlagsNow, Data: r.DataNow}, holders: map[string]bool{}, calls: map[*call]string{}, more: r.more, identity: r.identity(),
	}
	if m.driver == nil {
		return nil, fmt.Errorf("storage %.200q: unknown driver %.40q", r.MountPoint, r.Driver)
	}
	if !mount.IsPoint(r.MountPoint) {
		return nil, fmt.Errorf("storage %.200q: the mount point must be an absolute path below /", r.MountPoint)
	}
	if len(r.Holders) == 0 {
		return nil, fmt.Errorf("storage %.200q: held by %q", r.MountPoint, r.Holders)
	}
	for _, holder := range r.Holders {
		m.holders[holder] = true
	}
	return m, m.driver.check(m.request)
}

// These types have only the known fields and no methods, so that the methods below do not recurse.
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
