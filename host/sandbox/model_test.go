package sandbox_test

import (
	"context"
	"errors"
	"flag"
	"maps"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/host/sandbox/promises"
	"github.com/directvol/directvol/host/trial"
)

// names are volume names, as callers choose them.
var names = []string{"pvc-1", "/run/kata-containers/shared/direct-volumes/cA==", "c"}

// storeOf returns the path of a volume's store.
func storeOf(name string) string { return "/stores/" + name }

// sizeOf returns a store's size. Sizes differ, so that statistics show whose they are.
func sizeOf(store string) uint64 {
	return uint64(1 + slices.IndexFunc(names, func(name string) bool { return storeOf(name) == store }))
}

func volumeOf(name string) sandbox.Volume {
	return sandbox.Volume{ID: name, Path: storeOf(name), FSType: "ext4"}
}

var limits = []time.Duration{5 * time.Millisecond, 15 * time.Millisecond, 25 * time.Millisecond, 250 * time.Millisecond, 5 * time.Second, 20 * time.Second}

// call records a call to the sandbox.
type call struct {
	what, volume string
	deadline     time.Time
	cancel       context.CancelFunc
	mustWork     bool
	answered     bool
}

// model records what is known of a sandbox from outside.
type model struct {
	*world
	sandbox *sandbox.Sandbox
	ledger  promises.Ledger

	calls    sync.Mutex // guards the fields below
	inFlight []*call
	wrong    []string // answers that were wrong
}

func newModel() *model {
	w := newWorld()
	m := &model{world: w}
	m.sandbox = sandbox.New(machine{w}, agent{w}, func(ctx context.Context, path string) error {
		err := w.await(ctx, func() bool { return !w.storeHangs[path] }, func() error { return nil })
		if err != nil && ctx.Err() != nil {
			return errors.Join(sandbox.ErrStoreHangs, trial.ErrHangs, err)
		}
		return err
	})
	return m
}

// begin starts a call in a goroutine of its own.
func (m *model) begin(t *rapid.T, what, volume string, mustWork bool, do func(context.Context) error) {
	limit := rapid.SampledFrom(limits).Draw(t, "limit")
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	c := &call{what: what, volume: volume, cancel: cancel, deadline: time.Now().Add(limit), mustWork: mustWork && limit >= time.Second && m.isFine()}
	m.inFlight = append(m.inFlight, c)
	go func() {
		defer cancel()
		err := do(ctx)
		m.calls.Lock()
		defer m.calls.Unlock()
		c.answered = true
		if time.Now().After(c.deadline) {
			m.wrong = append(m.wrong, what+" "+volume+" was answered after its deadline")
		}
		if err != nil && c.mustWork {
			m.wrong = append(m.wrong, what+" "+volume+" failed, and nothing was wrong: "+err.Error())
		}
	}()
	synctest.Wait()
}

// isFine reports whether there is no fault and no other call in progress.
func (m *model) isFine() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.inFlight) == 0 && !m.dead() && !m.stuck && !m.keeps && m.machineAnswers == comes && m.agentAnswers == comes && len(m.late) == 0 &&
		!slices.ContainsFunc(names, func(n string) bool { return m.hung[storeOf(n)] || m.busy[storeOf(n)] || m.storeHangs[storeOf(n)] }) && len(m.held(foreign)) == 0
}

// changes returns an action that makes a call that changes a volume.
func (m *model) changes(verb promises.Verb, do func(context.Context, string) error) func(*rapid.T) {
	return func(t *rapid.T) {
		name := rapid.SampledFrom(names).Draw(t, "volume")
		was := m.ledger.Of(name)
		works := verb == promises.Attach || verb == promises.Detach || was.Made && was.State != sandbox.Absent
		end := m.ledger.Begin(verb, name)
		m.begin(t, verb.String(), name, works, func(ctx context.Context) error {
			err := do(ctx, name)
			end(err)
			return err
		})
	}
}

func (m *model) attach(ctx context.Context, name string) error {
	return m.sandbox.Attach(ctx, volumeOf(name))
}

func (m *model) mount(ctx context.Context, name string) error {
	_, err := m.sandbox.Mount(ctx, name)
	return err
}

// attachOther attaches a mounted volume with other options than it has; that must be refused.
func (m *model) attachOther(t *rapid.T) {
	name := rapid.SampledFrom(names).Draw(t, "volume")
	if m.sandbox.State(name) != sandbox.Mounted || len(m.inFlight) > 0 {
		t.Skip("it may be attached so")
	}
	other := volumeOf(name)
	other.Options = []string{"noatime"}
	sure := m.ledger.Of(name).Made
	m.begin(t, "attach with other options", name, false, func(ctx context.Context) error {
		if err := m.sandbox.Attach(ctx, other); err == nil && sure {
			m.calls.Lock()
			defer m.calls.Unlock()
			m.wrong = append(m.wrong, "attach "+name+" with other options was answered with OK")
		}
		return nil
	})
}

func (m *model) stats(t *rapid.T) {
	name := rapid.SampledFrom(names).Draw(t, "volume")
	was := m.ledger.Of(name)
	m.mu.Lock()
	quick := m.slow == 0
	m.mu.Unlock()
	m.begin(t, "stats", name, quick && was.Made && was.State == sandbox.Mounted, func(ctx context.Context) error {
		stats, err := m.sandbox.Stats(ctx, name)
		if err == nil && stats.Usage[0].Total != sizeOf(storeOf(name)) {
			m.calls.Lock()
			defer m.calls.Unlock()
			m.wrong = append(m.wrong, "stats of "+name+" are another volume's")
		}
		return err
	})
}

// replaces makes a caller detach one volume and at once mount another, which may get the place of
// the first.
func (m *model) replaces(t *rapid.T) {
	first := rapid.SampledFrom(names).Draw(t, "first")
	second := rapid.SampledFrom(names).Draw(t, "second")
	m.begin(t, "replace by "+second, first, false, func(ctx context.Context) error {
		for _, step := range []struct {
			verb   promises.Verb
			volume string
			do     func(context.Context, string) error
		}{{promises.Detach, first, m.sandbox.Detach}, {promises.Attach, second, m.attach}, {promises.Mount, second, m.mount}} {
			end := m.ledger.Begin(step.verb, step.volume)
			err := step.do(ctx, step.volume)
			if end(err); err != nil {
				return err
			}
		}
		return nil
	})
}

// giveUp cancels a call's context.
func (m *model) giveUp(t *rapid.T) {
	var waiting []*call
	for _, c := range m.inFlight {
		if !c.answered {
			waiting = append(waiting, c)
		}
	}
	if len(waiting) == 0 {
		t.Skip("nobody waits")
	}
	c := rapid.SampledFrom(waiting).Draw(t, "call")
	c.mustWork = false
	c.cancel()
	synctest.Wait()
	if !c.answered {
		t.Errorf("%s %s: its caller hung up, but the call continues", c.what, c.volume)
	}
}

// spoil injects a fault. The calls in progress may fail from then on.
func (m *model) spoil(do func()) {
	m.calls.Lock()
	for _, c := range m.inFlight {
		c.mustWork = false
	}
	m.calls.Unlock()
	m.change(do)
	synctest.Wait()
}

func (m *model) flip(which *bool) func(*rapid.T) {
	return func(*rapid.T) {
		m.spoil(func() { *which = !*which })
		m.letLeave()
	}
}

// letLeave makes the guest release the disks that it was asked for, unless it is stuck.
func (m *model) letLeave() {
	m.change(func() {
		for _, d := range m.disks {
			if d.leaving && !m.stuck {
				m.leave(d, false)
			}
		}
	})
	synctest.Wait()
}

func (m *model) flipStore(which map[string]bool) func(*rapid.T) {
	return func(t *rapid.T) {
		store := storeOf(rapid.SampledFrom(names).Draw(t, "store"))
		m.spoil(func() { which[store] = !which[store] })
	}
}

func (m *model) mood(which *how, moods ...how) func(*rapid.T) {
	return func(t *rapid.T) {
		mood := rapid.SampledFrom(moods).Draw(t, "answers")
		m.spoil(func() { *which = mood })
	}
}

func (m *model) slower(t *rapid.T) {
	slow := rapid.SampledFrom([]time.Duration{0, time.Second, 10 * time.Second}).Draw(t, "slow")
	m.spoil(func() { m.slow = slow })
}

// loses makes a disk leave by itself.
func (m *model) loses(t *rapid.T) {
	name := rapid.SampledFrom(names).Draw(t, "volume")
	m.spoil(func() {
		if d := m.disks[sandbox.DiskID(name)]; d != nil && !d.leaving {
			m.ledger.TakeBack(name)
			m.leave(d, true)
		}
	})
	if state := m.sandbox.State(name); state == sandbox.Attached || state == sandbox.Mounted {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.disks[sandbox.DiskID(name)] == nil {
			t.Errorf("%s is %v, and its disk is gone", name, state)
		}
	}
}

// shares makes a foreign container hold a volume's mount.
func (m *model) shares(t *rapid.T) {
	name := rapid.SampledFrom(names).Draw(t, "volume")
	m.spoil(func() {
		for _, mount := range m.mounts {
			if mount.disk.Path == storeOf(name) && !m.noService {
				mount.holders[foreign] = true
			}
		}
	})
}

func (m *model) unshares(*rapid.T) { m.spoil(m.endForeign) }

func (w *world) endForeign() {
	for point, mount := range w.mounts {
		if delete(mount.holders, foreign); len(mount.holders) == 0 {
			delete(w.mounts, point)
		}
	}
}

func (m *model) dies(t *rapid.T) {
	if !rapid.Bool().Draw(t, "really") || !rapid.Bool().Draw(t, "really and truly") {
		t.Skip("it lives")
	}
	for _, name := range names {
		m.ledger.TakeBack(name)
	}
	m.spoil(func() {})
	m.die()
	synctest.Wait()
}

func (m *model) wait(t *rapid.T) {
	time.Sleep(rapid.SampledFrom([]time.Duration{15 * time.Millisecond, time.Second, 10 * time.Second}).Draw(t, "time"))
	synctest.Wait()
}

// holds checks the invariants that apply whenever nothing is moving.
func (m *model) holds(t *rapid.T) {
	m.calls.Lock()
	defer m.calls.Unlock()
	for _, c := range m.inFlight {
		if !c.answered && !time.Now().Before(c.deadline) {
			t.Errorf("%s %s: no answer by its deadline", c.what, c.volume)
		}
	}
	m.inFlight = slices.DeleteFunc(m.inFlight, func(c *call) bool { return c.answered })
	for _, what := range m.wrong {
		t.Errorf("%s", what)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, what := range m.broken {
		t.Errorf("%s", what)
	}
	if m.dead() {
		return
	}
	for _, name := range names {
		m.holdsFor(t, name)
	}
}

// holdsFor compares a volume's promise and its state in the sandbox with the fake world. m.mu is
// held.
func (m *model) holdsFor(t *rapid.T, name string) {
	d, state := m.disks[sandbox.DiskID(name)], m.sandbox.State(name)
	mounted := d != nil && slices.ContainsFunc(m.users(d), func(point string) bool { return m.mounts[point].holders[sandbox.Holder(name)] })
	promise := m.ledger.Of(name)
	promised, sure := promise.State, promise.Made
	if sure && promised != sandbox.Absent && d == nil {
		t.Errorf("%s was promised to be %v, and has no disk", name, promised)
	}
	if sure && promised == sandbox.Mounted && !mounted {
		t.Errorf("%s was promised to be mounted, and is not", name)
	}
	if sure && promised == sandbox.Absent && d != nil {
		t.Errorf("%s was promised to be gone, and its disk is there", name)
	}
	if d != nil && state == sandbox.Absent {
		t.Errorf("%s is absent, and its disk is there", name)
	}
	if held := len(m.held(sandbox.Holder(name))) > 0; held && (state == sandbox.Absent || state == sandbox.Attaching || state == sandbox.Leaving) {
		t.Errorf("%s is %v, and is held in the guest", name, state)
	}
	if d != nil && d.leaving && state != sandbox.Leaving {
		t.Errorf("%s is %v, and its disk is about to leave", name, state)
	}
}

// end repairs all faults and detaches all volumes.
func (m *model) end(t *rapid.T) {
	m.spoil(func() {
		clear(m.hung)
		clear(m.busy)
		clear(m.storeHangs)
		m.machineAnswers, m.agentAnswers, m.stuck, m.keeps, m.slow = comes, comes, false, false, 0
		m.endForeign()
	})
	m.letLeave()
	time.Sleep(time.Minute)
	synctest.Wait()
	m.holds(t)
	for _, name := range names {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		if err := m.sandbox.Detach(ctx, name); err != nil {
			t.Errorf("detach %s, at the end: %v", name, err)
		}
		cancel()
	}
	if left := m.sandbox.Volumes(); len(left) > 0 {
		t.Errorf("after everything has gone the sandbox has %v", left)
	}
	if len(m.disks) > 0 || len(m.mounts) > 0 {
		t.Errorf("after everything has gone these are left: %v, %v", m.disks, m.mounts)
	}
}

// calling returns the callers' actions. The more important ones appear twice.
func (m *model) calling() map[string]func(*rapid.T) {
	attach, mount := m.changes(promises.Attach, m.attach), m.changes(promises.Mount, m.mount)
	unmount, detach := m.changes(promises.Unmount, m.sandbox.Unmount), m.changes(promises.Detach, m.sandbox.Detach)
	return map[string]func(*rapid.T){
		"attach": attach, "attach too": attach, "mount": mount, "mount too": mount, "unmount": unmount, "detach": detach, "detach too": detach,
		"stats": m.stats, "stats too": m.stats, "attach otherwise": m.attachOther, "replace": m.replaces, "give up": m.giveUp, "wait": m.wait, "wait too": m.wait,
	}
}

// faults returns the actions that cause and repair faults.
func (m *model) faults() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"stuck": m.flip(&m.stuck), "keeps": m.flip(&m.keeps), "hang": m.flipStore(m.hung), "busy": m.flipStore(m.busy), "store hangs": m.flipStore(m.storeHangs),
		"machine answers": m.mood(&m.machineAnswers, comes, comes, refused, lost, lostAfter, spoilt),
		"agent answers":   m.mood(&m.agentAnswers, comes, comes, refused, lost, lostAfter, lostLate),
		"slow":            m.slower, "a disk leaves": m.loses, "shared": m.shares, "unshared": m.unshares, "die": m.dies,
	}
}

// modelChecks is the number of sequences. With rapid's default number of steps in each, they have
// 100,000 steps in all.
const modelChecks = "3800"

// Several callers make calls with deadlines, give them up, repeat them and overlap them. Meanwhile
// answers get lost, disks hang, are in use, leave by themselves or are not released, and machines
// end: see the table in the package comment.
func TestVolumesAreInThePromisedState(t *testing.T) {
	checks := flag.Lookup("rapid.checks")
	if checks.Value.String() == checks.DefValue {
		if err := flag.Set("rapid.checks", modelChecks); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = flag.Set("rapid.checks", checks.DefValue) })
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // allows fewer interleavings, so that a failure can be reproduced
	steps := 0
	rapid.Check(t, func(t *rapid.T) {
		rapid.SyncTest(t, func(t *rapid.T) {
			m := newModel()
			m.noService = rapid.IntRange(0, 4).Draw(t, "service") == 0
			defer func() { // rapid panics to leave a sequence that it cannot use
				m.die()
				time.Sleep(time.Minute)
			}()
			step := func(do func(*rapid.T)) func(*rapid.T) {
				return func(t *rapid.T) { steps++; do(t) }
			}
			actions := map[string]func(*rapid.T){"": m.holds}
			for name, do := range m.calling() {
				actions[name] = step(do)
			}
			// A few faults per sequence reach deeper states than all faults at once.
			faults := m.faults()
			for _, name := range rapid.SliceOfNDistinct(rapid.SampledFrom(slices.Sorted(maps.Keys(faults))), 0, 4, rapid.ID[string]).Draw(t, "faults") {
				actions[name] = step(faults[name])
			}
			t.Repeat(actions)
			m.end(t)
		})
	})
	t.Logf("%d steps", steps)
}
