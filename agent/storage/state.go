package storage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
)

// State is the file in which an agent that is a service writes down who holds
// what, for the one after it: the kernel knows what is mounted, and not for whom.
// It belongs on a tmpfs, as it is worth nothing after a boot. A nil State keeps
// nothing, which is right for PID 1: the guest ends with it.
//
// A storage is written down before it is mounted and struck out after it is
// unmounted, so that whenever the agent is killed, no mount is missing in it.
type State struct {
	path string
	boot string   // of this boot: device numbers mean nothing in another one
	lock *os.File // held for as long as this agent lives

	mu sync.Mutex // one save at a time, each with all that changed before it
}

// bootID is the kernel's name for this boot (random(4)).
const bootID = "/proc/sys/kernel/random/boot_id"

// NewState returns the State at path, and makes its folder. It is this agent's
// alone until Close, or its end: that of another agent is refused.
func NewState(path string) (*State, error) {
	boot, err := os.ReadFile(bootID)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("state %s: it is there, and no regular file: name another one", path)
	}
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("state %s: another agent has it: give this one its own: %w", path, err)
	}
	return &State{path: path, boot: strings.TrimSpace(string(boot)), lock: lock}, nil
}

// Close lets another agent have the state, as the end of this one does. That may
// come late: a process does not end while a disk that hangs keeps a thread of it.
func (s *State) Close() error {
	if s == nil {
		return nil
	}
	return s.lock.Close()
}

// stateVersion counts what was added to the file. Any version is read as far as its
// fields are known, and keeps the others.
const stateVersion = 2

// stateBytes is more than any sandbox's storages need.
const stateBytes = 16 << 20

// snapshot is what the file holds.
type snapshot struct {
	Version   int      `json:"version"`
	Boot      string   `json:"boot_id"`
	Destroyed bool     `json:"sandbox_destroyed,omitempty"`
	Heard     uint64   `json:"kernel_log,omitempty"` // the last record whose meaning is in Past
	Storages  []record `json:"storages"`

	more rest
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

	more rest
}

// write replaces the file, whole or not at all.
func (s *State) write(now snapshot) error {
	now.Version, now.Boot = max(now.Version, stateVersion), s.boot
	text, err := json.Marshal(now)
	if err != nil {
		return err
	}
	if len(text) > stateBytes {
		return fmt.Errorf("%d bytes are more than the %d that are read back", len(text), stateBytes)
	}
	next := s.path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	file, err := os.OpenFile(next, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) // follows no link
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	return os.Rename(next, s.path)
}

// read returns what the file holds; nothing where there is none, or it is of
// another boot.
func (s *State) read() (snapshot, error) {
	file, err := os.Open(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return snapshot{}, nil
	} else if err != nil {
		return snapshot{}, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, stateBytes+1))
	if err != nil {
		return snapshot{}, err
	}
	return s.parse(text)
}

func (s *State) parse(text []byte) (snapshot, error) {
	var was snapshot
	if len(text) > stateBytes {
		return snapshot{}, fmt.Errorf("more than %d bytes", stateBytes)
	}
	if err := json.Unmarshal(text, &was); err != nil {
		return snapshot{}, err
	}
	if was.Version < 1 {
		return snapshot{}, fmt.Errorf("version %d: want 1 or more", was.Version)
	}
	if was.Boot == "" {
		return snapshot{}, errors.New("no boot_id")
	}
	if was.Boot != s.boot {
		return snapshot{}, nil
	}
	return was, nil
}

// recordOf is a storage as it is written down.
func recordOf(m *mounted, of mount.Identity, past health.Past) record {
	if !of.Same(m.mount()) { // somebody has mounted something there meanwhile
		past = health.Past{}
	}
	return record{
		Driver: m.driver.name, Source: m.source, FSType: m.fstype, Flags: m.flags, Data: m.data,
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
		request: request{driver: driverOf(r.Driver), source: r.Source, fstype: r.FSType, flags: r.Flags, data: r.Data, mountPoint: r.MountPoint},
		from:    origin{r.Device, mount.Device{Number: r.Number, Seq: r.Seq}}, made: r.Made, holders: map[string]bool{}, calls: map[*call]string{}, more: r.more, identity: r.identity(),
	}
	if m.driver == nil {
		return nil, fmt.Errorf("storage %.200q: unknown driver %.40q", r.MountPoint, r.Driver)
	}
	if !isMountPoint(r.MountPoint) {
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

// isThere tells whether a storage that was written down is there still, by what
// the kernel says.
func (m *mounted) isThere() (bool, error) {
	there, err := m.driver.there(m)
	if there {
		return true, nil // be it covered: that is for whoever uses it
	}
	return false, err
}

// Recover takes over what the agent before this one has left: what its state
// names and mountinfo has. It goes before any call. A state that makes no sense is
// kept beside itself for people to read, and mountinfo is the truth then: what it held
// is a stranger's until it is asked for again.
func (t *Table) Recover() error {
	if t.state == nil {
		return nil
	}
	was, err := t.state.read()
	var errs []error
	if err != nil {
		mounts, listErr := mount.All()
		errs = append(errs, err, listErr)
		t.strangers = strangersOf(mounts)
	}
	t.past = snapshot{Version: was.Version, more: was.more}
	filesystem.EndLaptopMode()
	for _, r := range was.Storages {
		if err := t.recover(r); err != nil {
			errs = append(errs, err)
			if isMountPoint(r.MountPoint) {
				t.strangers = append(t.strangers, stranger{mountPoint: r.MountPoint, holders: r.Holders, record: r})
			}
		}
	}
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	if len(errs) > 0 {
		aside := t.state.path + ".bad"
		errs = append([]error{fmt.Errorf("state %s, kept as %s: what follows is not known, and no container that may have it is removed before it is asked for again", t.state.path, aside)}, errs...)
		if err := os.Link(t.state.path, aside); !errors.Is(err, fs.ErrExist) { // the first is what nobody has written over
			errs = append(errs, err)
		}
	}
	t.volumes.Monitor().HearFrom(was.Heard)
	t.mu.Lock()
	t.ended = was.Destroyed
	t.mu.Unlock()
	return errors.Join(append(errs, t.save())...)
}

func (t *Table) recover(r record) error {
	m, err := r.mounted()
	if err != nil {
		return err
	}
	there, err := m.isThere()
	if err != nil {
		return err
	}
	entry := t.log.WithFields(logrus.Fields{"mountpoint": m.mountPoint, "device": m.origin().path, "holders": r.Holders})
	if !there && t.proveFree(m) != nil {
		entry.Warn("storage is unmounted, and its device is still in use: its holders keep it")
		t.mu.Lock()
		t.mounts[m.mountPoint] = m
		t.mu.Unlock()
		return nil
	}
	if !there {
		if m.made {
			os.Remove(m.mountPoint)
		}
		entry.Info("storage is not there any more")
		return nil
	}
	t.mu.Lock()
	t.mounts[m.mountPoint] = m
	t.mu.Unlock()
	entry.Info("storage taken over")
	if err := t.adopt(m); err != nil {
		return err
	}
	if !m.driver.device {
		return nil // nothing watches it, and its root may hang
	}
	if err := t.volumes.Own(m.mountPoint, r.identity(), r.Past); err != nil {
		return fmt.Errorf("watch %s: %w", m.mountPoint, err)
	}
	return nil
}

// Follow saves whenever changed delivers, until ctx ends.
func (t *Table) Follow(ctx context.Context, changed <-chan struct{}) {
	for {
		select {
		case <-changed:
			if err := t.save(); err != nil {
				t.log.Error(err)
			}
		case <-ctx.Done():
			return
		}
	}
}

// save writes down everything as it is now.
func (t *Table) save() error {
	if t.state == nil {
		return nil
	}
	t.state.mu.Lock()
	defer t.state.mu.Unlock()
	if err := t.state.write(t.snapshot()); err != nil {
		return fmt.Errorf("state: %w", err)
	}
	return nil
}

func (t *Table) snapshot() snapshot {
	t.mu.Lock()
	defer t.mu.Unlock()
	// Heard first: what is heard meanwhile is heard twice then, and not never.
	now := t.past
	now.Destroyed, now.Heard, now.Storages = t.ended, t.volumes.Monitor().Heard(), []record{}
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
