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

// Promise is what is known of a volume at one moment. Two that are equal have no call, and
// nothing that was taken back, between them.
type Promise struct {
	// State is what the volume must be in, where Made says that anything is promised.
	State sandbox.State
	Made  bool
	// Calm says that no call is under way.
	Calm bool

	begun int
}

// IsNext reports whether one call began since before, and nothing else was.
func (p Promise) IsNext(before Promise) bool { return p.begun == before.begun+1 }

// Of returns what a volume's callers were promised last.
func (l *Ledger) Of(volume string) Promise {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entry(volume)
	return Promise{State: e.state, Made: !e.unsure, Calm: e.underWay == 0, begun: e.begun}
}
