// Package promises records for tests what a sandbox's answers promise its callers. If a volume's
// last call was answered with OK and no call has begun since, the volume's state is known. The same
// ledger checks a sandbox over fakes and over a real machine.
package promises

import (
	"sync"

	"github.com/directvol/directvol/host/sandbox"
)

// Verb is a call that changes a volume.
type Verb int

// The verbs.
const (
	Attach Verb = iota
	Mount
	Unmount
	Detach
)

var names = [...]string{"attach", "mount", "unmount", "detach"}

// String returns the verb's name.
func (v Verb) String() string { return names[v] }

// leadsTo returns the state that OK promises. Attached only promises that the disk is there: the
// volume may still be mounted from an earlier call.
func (v Verb) leadsTo() sandbox.State {
	return [...]sandbox.State{sandbox.Attached, sandbox.Mounted, sandbox.Attached, sandbox.Absent}[v]
}

// keeps reports whether OK leaves the state unchanged.
func (v Verb) keeps(state sandbox.State) bool {
	return state == v.leadsTo() || v == Attach && state == sandbox.Mounted
}

// Ledger records the promises. The zero value is ready to use, with every volume absent.
type Ledger struct {
	mu      sync.Mutex
	volumes map[string]*entry
}

type entry struct {
	state    sandbox.State
	unsure   bool
	begun    int // calls and TakeBacks so far
	underWay int
}

func (l *Ledger) entry(volume string) *entry {
	if l.volumes == nil {
		l.volumes = map[string]*entry{}
	}
	if l.volumes[volume] == nil {
		l.volumes[volume] = &entry{}
	}
	return l.volumes[volume]
}

// Begin records the begin of a call. The caller passes the call's answer to end.
func (l *Ledger) Begin(verb Verb, volume string) (end func(error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entry(volume)
	e.begun++
	e.underWay++
	call, alone := e.begun, e.underWay == 1
	if verb == Unmount && e.unsure {
		alone = false // its OK does not promise that the disk is there
	}
	if e.unsure || !verb.keeps(e.state) {
		e.unsure = true
	}
	changes := e.unsure
	return func(err error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		e.underWay--
		if changes && alone && call == e.begun && err == nil {
			e.state, e.unsure = verb.leadsTo(), false
		}
	}
}

// TakeBack forgets the promise for a volume, because something other than a call has changed the
// volume.
func (l *Ledger) TakeBack(volume string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entry(volume)
	e.unsure = true
	e.begun++ // calls in progress promise nothing either
}

// Promise is what is known about a volume at one moment. If two Promises are equal, no call began
// and no TakeBack happened between them.
type Promise struct {
	// State is the state that the volume must have, if Made is true.
	State sandbox.State
	Made  bool
	// Calm is true if no call is in progress.
	Calm bool

	begun int
}

// IsNext reports whether exactly one call, and no TakeBack, happened since before.
func (p Promise) IsNext(before Promise) bool { return p.begun == before.begun+1 }

// Of returns the last promise for a volume.
func (l *Ledger) Of(volume string) Promise {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entry(volume)
	return Promise{State: e.state, Made: !e.unsure, Calm: e.underWay == 0, begun: e.begun}
}
