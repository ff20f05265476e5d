// Package storage implements Storage messages: which device a message names, where it is mounted,
// and who holds it. A storage is mounted once and held by the sandbox or by containers. When the
// last holder releases it, it is unmounted, and its device is proven free.
//
// A call owns what it needs until it ends: the failure of another call does not take that away, and
// its own failure undoes exactly what it has added. Calls wait for disks without a limit and go on
// after their caller's deadline, so a caller runs them in a separate goroutine (agent/sandbox).
package storage

import (
	"context"
	"errors"
	"maps"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/flight"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/state"
	"github.com/directvol/directvol/agent/turns"
)

// Sandbox is the holder of storages that outlive every container.
const Sandbox = ""

// Volumes are the methods of volume.Table that this package needs; volume.Table documents them. A
// mounted storage is a volume, which is watched and may be growing when it has to be unmounted.
type Volumes interface {
	Own(path string, of mount.Identity, past health.Past) error
	Disown(path string)
	Observe(path string) error
	Forget(path string)

	Past(path string, of mount.Identity) health.Past
	Remember(path string, past health.Past)
	Heard() uint64
	HearFrom(record uint64)

	Unfreeze(ctx context.Context, path string) error
	Settle(ctx context.Context, path string, failed func(error)) error
	Quiet(ctx context.Context, path string, do func() (gone bool, err error)) error
}

// Table holds the storages and their holders.
type Table struct {
	log     *logrus.Entry
	volumes Volumes
	hotplug time.Duration // how long to wait for a device that is being plugged in
	state   *state.File
	turns   turns.Turns // by mount point
	devices devices

	mu        sync.Mutex
	past      snapshot // the state that was read; its unknown fields are written back
	strangers []stranger
	ended     bool                // the sandbox was destroyed
	mounts    map[string]*mounted // by mount point
	intents   map[string]*mounted // storages that are being mounted, for the state file
	atDisks   map[*mounted]bool   // storages at whose disk a call is, and may have to wait
}

// mounted is a storage that is mounted. It is changed only in its mount point's turn and under
// Table.mu, so that either is enough to read it. There are two exceptions: Table.mu alone guards
// holders, calls and again, and the mutex which guards the fields below it. A storage gets new
// holders and loses its last one only in its turn, and is unmounted in the same turn.
type mounted struct {
	request
	made    bool // the agent made the mount point's directory and removes it
	found   bool // somebody else's mount that only calls in progress need: it stays mounted if they fail
	again   bool // the storage is being mounted again
	holders map[string]bool
	calls   map[*call]string // calls that need it, with the holder that each adds if it succeeds

	updated mount.Options // the options that the mount has had since an update; without one, Flags is 0

	departure *departure // the one that unmounts it or mounts it again now, or nil

	which    sync.Mutex // guards from and identity, which are set in the turn and read at any time
	from     origin
	identity mount.Identity // of the mount that was made or taken over; zero before that

	uuids flight.Flights[origin, string]

	more state.Rest // unknown fields of its record
}

// NewTable returns a Table that holds nothing yet. hotplug is how long to wait for a device that
// the guest does not see yet. file is nil if no state is kept, which is right for PID 1: the guest
// ends with it.
func NewTable(log *logrus.Entry, volumes Volumes, hotplug time.Duration, file *state.File) *Table {
	return &Table{log: log, volumes: volumes, hotplug: hotplug, state: file, mounts: map[string]*mounted{}, intents: map[string]*mounted{}, atDisks: map[*mounted]bool{}}
}

// Ended reports whether the sandbox was destroyed; no storage can be held then.
func (t *Table) Ended() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ended
}

// End sets the value that Ended reports. If the state file cannot be written, the value stays.
func (t *Table) End(ended bool) error {
	t.mu.Lock()
	was := t.ended
	t.ended = ended
	t.mu.Unlock()
	if was == ended {
		return nil
	}
	err := t.save()
	if err != nil {
		t.mu.Lock()
		t.ended = was
		t.mu.Unlock()
	}
	return err
}

var errEnded = errkind.New(errkind.FailedPrecondition, "the sandbox is destroyed: nothing can be mounted in it")

// inTurn runs do in a mount point's turn. do makes system calls that may wait for a disk without a
// limit.
func (t *Table) inTurn(ctx context.Context, what, mountPoint string, do func() error) error {
	done, err := t.turns.Take(ctx, mountPoint)
	if err != nil {
		return errkind.New(errkind.DeadlineExceeded, "%s %s: another call for it has not ended, its disk may not answer: %w", what, mountPoint, err)
	}
	defer done()
	return do()
}

// heldBy returns the mounted storages that match, nested ones first.
func (t *Table) heldBy(matches func(*mounted) bool) []*mounted {
	t.mu.Lock()
	defer t.mu.Unlock()
	var found []*mounted
	for _, m := range t.mounts {
		if matches(m) {
			found = append(found, m)
		}
	}
	return nestedFirst(found)
}

// known returns the storages that match and are mounted or being mounted, in no order.
func (t *Table) known(matches func(*mounted) bool) []*mounted {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := slices.AppendSeq(slices.Collect(maps.Values(t.mounts)), maps.Values(t.intents))
	return slices.DeleteFunc(all, func(m *mounted) bool { return !matches(m) })
}

// Mount is a storage that is mounted.
type Mount struct{ MountPoint, Driver string }

// Mounted returns the storages that somebody holds, in no order.
func (t *Table) Mounted() []Mount {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]Mount, 0, len(t.mounts))
	for mountPoint, m := range t.mounts {
		all = append(all, Mount{mountPoint, m.driver.name})
	}
	return all
}

func (t *Table) at(mountPoint string) *mounted {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mounts[mountPoint]
}

// each calls do for all storages concurrently; all must have nested ones first. A storage waits for
// those nested in it. A panic in do becomes an error.
func (t *Table) each(all []*mounted, do func(*mounted) error) error {
	errs, done := make([]error, len(all)), make([]chan struct{}, len(all))
	var wait sync.WaitGroup
	for i, m := range all {
		done[i] = make(chan struct{})
		wait.Go(func() {
			defer close(done[i])
			for j, other := range all[:i] {
				if m.contains(other) {
					<-done[j]
				}
			}
			errs[i] = t.safely(m, do)
		})
	}
	wait.Wait()
	return errors.Join(errs...)
}

// safely turns a panic into an error, because do runs in a goroutine of its own.
func (t *Table) safely(m *mounted, do func(*mounted) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			t.log.Errorf("storage %s: panic: %v\n%s", m.mountPoint, p, debug.Stack())
			err = errkind.New(errkind.Internal, "storage %s: the agent has a bug, its log says more", m.mountPoint)
		}
	}()
	return do(m)
}

// hasNested reports whether one of others is mounted within m.
func (m *mounted) hasNested(others []*mounted) bool { return slices.ContainsFunc(others, m.contains) }

// contains reports whether another storage is mounted within m.
func (m *mounted) contains(o *mounted) bool {
	within, is := strings.CutPrefix(o.mountPoint, m.mountPoint)
	return is && strings.HasPrefix(within, "/")
}

// nestedFirst orders storages so that those mounted within others come first.
func nestedFirst(all []*mounted) []*mounted {
	return slices.SortedFunc(slices.Values(all), func(a, b *mounted) int { return strings.Compare(b.mountPoint, a.mountPoint) })
}
