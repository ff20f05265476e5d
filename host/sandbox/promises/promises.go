// Package promises keeps what the answers of a sandbox promise its callers, for tests:
// of a volume whose last call was answered with OK, and at which no call is since, it is
// known what must be so. The same ledger judges a sandbox over fakes and over a real
// machine.
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

// String returns the verb as a word.
func (v Verb) String() string { return names[v] }

// leadsTo is the state that OK promises. Attached says that the disk is there: whether the
// volume is mounted may still be from an earlier call.
func (v Verb) leadsTo() sandbox.State {
	return [...]sandbox.State{sandbox.Attached, sandbox.Mounted, sandbox.Attached, sandbox.Absent}[v]
}

// keeps reports whether OK leaves a state as it is.
func (v Verb) keeps(state sandbox.State) bool {
	return state == v.leadsTo() || v == Attach && state == sandbox.Mounted
}

// Ledger knows the promises. The zero value is ready, and every volume is absent.
type Ledger struct {
	mu      sync.Mutex
	volumes map[string]*entry
}

type entry struct {
	state    sandbox.State
	unsure   bool
	begun    int // calls so far, and what took something back
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

// Begin notes a call, and end its answer.
func (l *Ledger) Begin(verb Verb, volume string) (end func(error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entry(volume)
	e.begun++
	e.underWay++
	call, alone := e.begun, e.underWay == 1
	if verb == Unmount && e.unsure {
		alone = false // its OK does not say that the disk is there
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

// TakeBack forgets what was promised of a volume: something else took it away.
func (l *Ledger) TakeBack(volume string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entry(volume)
	e.unsure = true
	e.begun++ // what is under way promises nothing either
}

// Of returns the state that a volume must be in, where anything is promised.
func (l *Ledger) Of(volume string) (state sandbox.State, promised bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entry(volume)
	return e.state, !e.unsure
}
