package storage_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"pgregory.net/rapid"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/sandbox"
	"github.com/directvol/directvol/agent/state"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/agentpb"
)

// kernel is a fake kernel with disks that arrive late, hang, fail and are busy.
type kernel struct {
	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each change
	plugged map[string]bool
	hung    map[string]bool   // by device: mount and unmount wait
	faulty  map[string]bool   // by device: mount fails
	busy    map[string]bool   // by device: unmount fails
	mounted map[string]string // devices by mount point
}

func newKernel() *kernel {
	return &kernel{changed: make(chan struct{}), plugged: map[string]bool{}, hung: map[string]bool{}, faulty: map[string]bool{}, busy: map[string]bool{}, mounted: map[string]string{}}
}

func (k *kernel) change(do func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	do()
	close(k.changed)
	k.changed = make(chan struct{})
}

// await waits until is returns true, and then runs do. Both run under k.mu, without another caller
// in between.
func (k *kernel) await(ctx context.Context, is func() bool, do func() error) error {
	for {
		k.mu.Lock()
		if is() {
			defer k.mu.Unlock()
			return do()
		}
		changed := k.changed
		k.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (k *kernel) Find(ctx context.Context, source string) error {
	return k.await(ctx, func() bool { return k.plugged[source] }, func() error { return nil })
}

func (k *kernel) Mount(source, mountPoint string) error {
	return k.await(context.Background(), func() bool { return !k.hung[source] }, func() error {
		if k.faulty[source] {
			return errors.New("input/output error")
		}
		if was, ok := k.mounted[mountPoint]; ok {
			return fmt.Errorf("%s is mounted there", was)
		}
		k.mounted[mountPoint] = source
		return nil
	})
}

func (k *kernel) CouldUnmount(ctx context.Context, mountPoint string) error {
	k.mu.Lock()
	device := k.mounted[mountPoint]
	k.mu.Unlock()
	return k.await(ctx, func() bool { return !k.hung[device] }, func() error {
		if device != "" && k.busy[device] {
			return errkind.New(errkind.FailedPrecondition, "device or resource busy")
		}
		return nil
	})
}

func (k *kernel) Unmount(mountPoint string) error {
	k.mu.Lock()
	device := k.mounted[mountPoint]
	k.mu.Unlock()
	return k.await(context.Background(), func() bool { return !k.hung[device] }, func() error {
		if device != "" && k.busy[device] {
			return errkind.New(errkind.FailedPrecondition, "device or resource busy")
		}
		delete(k.mounted, mountPoint)
		return nil
	})
}

func (k *kernel) Mounted(source, mountPoint string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.mounted[mountPoint] == source
}

// agent is one agent on a kernel, which outlives the agent. The kernel call at which an agent is
// killed was either made or not made; the agent makes none after that.
type agent struct {
	*kernel
	state    *state.File
	table    *storage.Table
	sandbox  *sandbox.Sandbox
	undo     func()
	destroys atomic.Int32 // in progress, answered or not

	mu   sync.Mutex
	dead bool
	left int  // the number of kernel calls before the one at which it is killed; negative for never
	made bool // whether that call is still made
}

var errDead = errors.New("the agent is dead")

// do makes a kernel call if the agent is alive.
func (a *agent) do(call func() error) error {
	a.mu.Lock()
	last := !a.dead && a.left == 0
	if a.left--; last {
		a.dead = true
		a.state.Close()
	}
	skip := a.dead && !(last && a.made)
	a.mu.Unlock()
	if skip {
		return errDead
	}
	if err := call(); !last {
		return err
	}
	return errDead
}

func (a *agent) Find(ctx context.Context, source string) error {
	return a.do(func() error { return a.kernel.Find(ctx, source) })
}

func (a *agent) Mount(source, mountPoint string) error {
	return a.do(func() error { return a.kernel.Mount(source, mountPoint) })
}

func (a *agent) CouldUnmount(ctx context.Context, mountPoint string) error {
	return a.do(func() error { return a.kernel.CouldUnmount(ctx, mountPoint) })
}

func (a *agent) Unmount(mountPoint string) error {
	return a.do(func() error { return a.kernel.Unmount(mountPoint) })
}

func (a *agent) Mounted(source, mountPoint string) (is bool) {
	_ = a.do(func() error { is = a.kernel.Mounted(source, mountPoint); return nil })
	return is
}

func (a *agent) isDead() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.dead
}

// die kills the agent if it is alive.
func (a *agent) die() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.dead {
		a.dead = true
		a.state.Close()
	}
}

// startAgent starts an agent on the existing state.
func startAgent(t *rapid.T, k *kernel, path string) *agent {
	log := logrus.New()
	log.SetOutput(io.Discard)
	entry := logrus.NewEntry(log)
	a := &agent{kernel: k, left: -1}
	var err error
	if a.state, err = state.Open(path); err != nil {
		t.Fatal(err)
	}
	a.undo = storage.SetFakeKernel(a)
	a.table = storage.NewTable(entry, volume.NewTable(health.NewMonitor(entry)), hotplug, a.state)
	a.sandbox = sandbox.New(entry, destroying{a.table, &a.destroys})
	if err := a.table.Recover(); err != nil {
		t.Errorf("an agent that begins: %v", err)
	}
	return a
}

// now returns the current mounts, and whether any disk hangs.
func (k *kernel) now() (mounted map[string]string, hangs bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.mounted), slices.Contains(slices.Collect(maps.Values(k.hung)), true)
}

// isFine reports whether the devices have no fault, and no other disk hangs in a way that may block
// a container.
func (k *kernel) isFine(devices []string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return !slices.Contains(slices.Collect(maps.Values(k.hung)), true) && !slices.ContainsFunc(devices, func(device string) bool {
		return !k.plugged[device] || k.faulty[device]
	})
}

func (k *kernel) isFaulty(device string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.faulty[device]
}

func (k *kernel) isHung(device string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.hung[device]
}

// place returns the mount point of a device.
func place(device string) string { return "/run/model/" + device }

var (
	devices    = []string{"a", "b", "c", "s"}
	containers = []string{"c1", "c2", "c3"}
	limits     = []time.Duration{250 * time.Millisecond, time.Second, 5 * time.Second, 20 * time.Second}
)

// shared is the device whose storage the sandbox holds, whoever asks for it.
const shared = "s"

func ownerOf(container, device string) string {
	if device == shared {
		return storage.Sandbox
	}
	return container
}

// call is a call that was made.
type call struct {
	verb, container string
	devices         []string
	deadline        time.Time
	cancel          context.CancelFunc
	gaveUp          bool
	by              *agent
	began           int  // for a create: takenFrom at its start; for a remove: asked at its start
	alone           bool // for a remove: no create of the container was in progress; for others: no call was
	expects         life // for a create: the expected life, or none if it may fail

	answered bool
	err      error
	at       time.Time // of the answer
}

// model is what is known of a sandbox from its answers alone.
type model struct {
	t         *rapid.T
	kernel    *kernel
	*agent    // the current agent
	stateFile string

	mu       sync.Mutex
	inFlight []*call
	promised map[string]map[string]bool // devices by owner: the answer was OK, and no later call releases them
	mayHold  map[string]map[string]bool // devices by owner: the answer was OK once, and no remove or destroy was OK since
	wasBusy  map[string]bool            // devices: a storage that could not be undone is held
	late     []string                   // wrong answers, and answers after their caller's deadline
	removed  map[string]bool            // containers: the removal was OK, and nobody has asked for them since
	asked    map[string]int             // how often each container was asked for
	newest   *call                      // the last call that was made
	undoing  []*call                    // creates that have failed, and may not have undone everything yet
	life     life                       // of the sandbox
	lives    int                        // how often calls asked for a change of life
	returns  map[string]bool            // devices that a failed destroy mounts again when they answer
	taken    map[string]int             // how often removes of a container, or destroys, began and ended
}

// life is the known state of a sandbox.
type life int

const (
	unknown life = iota
	runs
	ended
)

// destroying counts the destroys in progress.
type destroying struct {
	*storage.Table
	count *atomic.Int32
}

func (d destroying) ReleaseAll(ctx context.Context, agreed func() bool) error {
	d.count.Add(1)
	defer d.count.Add(-1)
	return d.Table.ReleaseAll(ctx, agreed)
}

const hotplug = 2 * time.Second

func newModel(t *rapid.T, state string) *model {
	m := &model{t: t, stateFile: state, kernel: newKernel(), promised: map[string]map[string]bool{}, mayHold: map[string]map[string]bool{}, wasBusy: map[string]bool{}, removed: map[string]bool{}, asked: map[string]int{}, taken: map[string]int{}, returns: map[string]bool{}}
	m.life = runs
	m.agent = startAgent(t, m.kernel, state)
	return m
}

// cut makes the agent die at, or right after, one of the kernel calls of a call, and starts another
// agent. A disk that hangs keeps a killed process alive, and so keeps the next agent from starting.
func (m *model) cut(t *rapid.T) {
	if _, hangs := m.kernel.now(); hangs {
		t.Skip("the agent would not end")
	}
	m.agent.mu.Lock()
	m.agent.left, m.agent.made = rapid.IntRange(0, 9).Draw(t, "at"), rapid.Bool().Draw(t, "made")
	m.agent.mu.Unlock()
	rapid.SampledFrom([]func(*rapid.T){m.create, m.remove, m.destroy, m.createSandbox, m.wait}).Draw(t, "call")(t)
	m.agent.die()
	m.mu.Lock()
	for _, c := range m.inFlight {
		if !c.answered {
			m.lost(c)
		}
	}
	for _, c := range m.undoing {
		m.lost(c)
	}
	m.undoing = nil
	if m.destroys.Load() > 0 {
		clear(m.promised)
	}
	m.inFlight = nil
	m.mu.Unlock()
	synctest.Wait()
	m.agent.undo()
	m.agent = startAgent(t, m.kernel, m.stateFile)
}

// lost records that a call gets no answer because its agent is dead. m.mu is held.
func (m *model) lost(c *call) {
	c.cancel()
	switch c.verb {
	case "create": // the next agent holds the storages that were mounted
		for _, device := range c.devices {
			add(m.mayHold, ownerOf(c.container, device), device)
		}
	case "remove":
		m.taken[c.container]++
		m.removed[c.container] = false
	case "destroy":
		m.taken[everybody]++
		clear(m.promised)
	}
}

// begin makes a call in a goroutine of its own.
func (m *model) begin(c *call, limit time.Duration, do func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	m.newest = c
	c.cancel, c.deadline, c.by = cancel, time.Now().Add(limit), m.agent
	m.inFlight = append(m.inFlight, c)
	go func() {
		defer cancel()
		err := do(ctx)
		m.mu.Lock()
		defer m.mu.Unlock()
		if c.by.isDead() {
			return // nobody gets the answer
		}
		c.answered, c.err, c.at = true, err, time.Now()
		m.learn(c)
	}()
	synctest.Wait()
}

// flying reports whether a call that matches is in progress.
func (m *model) flying(is func(*call) bool) bool {
	return slices.ContainsFunc(m.inFlight, func(c *call) bool { return !c.answered && is(c) })
}

// learn processes an answer. m.mu is held.
func (m *model) learn(c *call) {
	if !c.at.Before(c.deadline) && !c.gaveUp {
		m.late = append(m.late, c.verb+" "+c.container)
	}
	switch c.verb {
	case "create":
		if c.err != nil && c.expects == runs || c.err == nil && c.expects == ended {
			m.late = append(m.late, fmt.Sprintf("create %s %v: %v, in a sandbox that is %d: it", c.container, c.devices, c.err, c.expects))
		}
		for _, device := range c.devices {
			if c.err == nil {
				add(m.mayHold, ownerOf(c.container, device), device)
			}
		}
		if c.err != nil {
			m.undoing = append(m.undoing, c)
		}
		if c.err != nil || c.began != m.takenFrom(c.container) {
			return // the answer promises nothing, or another call has released the storages since; no other promise ends
		}
		for _, device := range c.devices {
			add(m.promised, ownerOf(c.container, device), device)
		}
	case "remove":
		m.taken[c.container]++
		delete(m.promised, c.container)
		m.removed[c.container] = c.err == nil && c.alone && c.began == m.asked[c.container]
		if m.removed[c.container] {
			delete(m.mayHold, c.container)
		}
	case "create sandbox":
		m.lived(c, runs, runs)
	case "destroy":
		m.taken[everybody]++
		if m.lived(c, ended, c.expects); c.err == nil && c.alone && c == m.newest {
			if left, _ := m.kernel.now(); len(left) > 0 {
				m.late = append(m.late, fmt.Sprintf("destroy, with %v still mounted,", left))
			}
			clear(m.mayHold)
		}
		if c.err == nil {
			clear(m.promised)
		}
		if c.err != nil {
			m.comeBack()
		}
		for _, promised := range m.promised { // a storage that cannot be mounted again is lost if a destroy fails late
			maps.DeleteFunc(promised, func(device string, _ bool) bool { return m.kernel.isFaulty(device) })
		}
	}
}

// comeBack notes which devices a failed destroy cannot mount again yet. The destroy waits only for
// a while for a disk that hangs; the storage is mounted again when the disk answers.
func (m *model) comeBack() {
	mounted, _ := m.kernel.now()
	for _, device := range devices {
		m.returns[device] = m.kernel.isHung(device) && mounted[place(device)] == ""
	}
}

const everybody = "*"

func (m *model) takenFrom(container string) int { return m.taken[container] + m.taken[everybody] }

// lived records the sandbox's state after the only call that could have changed it.
func (m *model) lived(c *call, ok, failed life) {
	switch {
	case !c.alone || c.began != m.lives:
		m.life = unknown
	case c.err == nil:
		m.life = ok
	default:
		m.life = failed
	}
}

// asksForLife notes that a call may change the state of the sandbox.
func (m *model) asksForLife(c *call) *call {
	m.lives++
	c.began, c.expects, c.alone = m.lives, m.life, !m.flying(func(*call) bool { return true }) && m.destroys.Load() == 0
	m.life = unknown
	return c
}

func add(to map[string]map[string]bool, owner, device string) {
	if to[owner] == nil {
		to[owner] = map[string]bool{}
	}
	to[owner][device] = true
}

func (m *model) create(t *rapid.T) {
	c := &call{verb: "create", container: rapid.SampledFrom(containers).Draw(t, "container"),
		devices: rapid.SliceOfNDistinct(rapid.SampledFrom(devices), 1, 3, rapid.ID[string]).Draw(t, "devices")}
	var storages []*agentpb.Storage
	for _, device := range c.devices {
		storages = append(storages, &agentpb.Storage{Driver: storage.FakeDriver, Source: device, MountPoint: place(device), Shared: device == shared})
	}
	m.removed[c.container] = false
	m.asked[c.container]++
	c.began = m.takenFrom(c.container)
	limit := rapid.SampledFrom(limits).Draw(t, "limit")
	if !m.flying(func(*call) bool { return true }) && m.destroys.Load() == 0 && (m.life == ended || m.kernel.isFine(c.devices)) {
		c.expects = m.life
	}
	m.begin(c, limit, func(ctx context.Context) error {
		return c.by.sandbox.CreateContainer(ctx, c.container, storages, nil)
	})
}

func (m *model) remove(t *rapid.T) {
	c := &call{verb: "remove", container: rapid.SampledFrom(containers).Draw(t, "container")}
	m.taken[c.container]++
	c.began, c.alone = m.asked[c.container], !m.flying(func(o *call) bool { return o.verb == "create" && o.container == c.container })
	delete(m.promised, c.container)
	m.begin(c, rapid.SampledFrom(limits).Draw(t, "limit"), func(ctx context.Context) error { return c.by.sandbox.RemoveContainer(ctx, c.container) })
}

func (m *model) destroy(t *rapid.T) {
	m.taken[everybody]++
	m.begin(m.asksForLife(&call{verb: "destroy"}), rapid.SampledFrom(limits).Draw(t, "limit"), m.sandbox.Destroy)
}

func (m *model) createSandbox(t *rapid.T) {
	m.begin(m.asksForLife(&call{verb: "create sandbox"}), rapid.SampledFrom(limits).Draw(t, "limit"), func(ctx context.Context) error { return m.sandbox.Create(ctx, sandbox.Settings{}, nil) })
}

// giveUp makes a caller give up.
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
	c.gaveUp = true
	c.cancel()
	synctest.Wait()
	if !c.answered {
		m.t.Errorf("%+v: its caller hung up, but the call continues", c)
	}
}

// flip changes a property of a disk.
func (m *model) flip(which func(*kernel) map[string]bool) func(*rapid.T) {
	return func(t *rapid.T) {
		device := rapid.SampledFrom(devices).Draw(t, "device")
		m.kernel.change(func() { which(m.kernel)[device] = !which(m.kernel)[device] })
		m.kernel.change(func() { m.wasBusy[device] = m.wasBusy[device] || m.kernel.busy[device] })
		synctest.Wait()
	}
}

// foreignUnmount is an unmount by somebody else in the guest.
func (m *model) foreignUnmount(t *rapid.T) {
	device := rapid.SampledFrom(devices).Draw(t, "device")
	m.kernel.change(func() {
		if !m.kernel.hung[device] && !m.kernel.busy[device] {
			delete(m.kernel.mounted, place(device))
			for _, promised := range m.promised {
				delete(promised, device)
			}
		}
	})
	synctest.Wait()
}

func (m *model) wait(t *rapid.T) {
	time.Sleep(rapid.SampledFrom([]time.Duration{100 * time.Millisecond, time.Second, 10 * time.Second}).Draw(t, "time"))
	synctest.Wait()
}

// holds checks what must be true whenever no call makes progress.
func (m *model) holds(t *rapid.T) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.inFlight {
		if late := time.Since(c.deadline); !c.answered && late >= 0 {
			t.Errorf("%s %s: no answer by its deadline", c.verb, c.container)
		}
	}
	for _, call := range m.late {
		t.Errorf("%s was not to be answered so, or then", call)
	}
	m.inFlight = slices.DeleteFunc(m.inFlight, func(c *call) bool { return c.answered })
	isMounted, hangs := m.kernel.now()
	for mountPoint := range isMounted {
		if len(m.table.Owners(mountPoint)) == 0 {
			t.Errorf("%s is mounted, and nobody holds it", mountPoint)
		}
	}
	for _, mountPoint := range m.table.MountPoints() {
		for _, owner := range m.table.Owners(mountPoint) {
			if m.removed[owner] && owner != storage.Sandbox {
				t.Errorf("%s is %s's, which was removed with OK", mountPoint, owner)
			}
		}
	}
	if !hangs && len(m.inFlight) == 0 {
		m.holdsNoMore(t)
	}
	if m.destroys.Load() > 0 {
		return // it unmounts, and if it fails it mounts again when the last disk answers
	}
	for _, device := range devices {
		m.returns[device] = m.returns[device] && m.kernel.isHung(device)
	}
	for owner, promised := range m.promised {
		for device := range promised {
			if isMounted[place(device)] != device && !m.returns[device] {
				t.Errorf("%s was promised to %q, and is not mounted", device, owner)
			}
			if !slices.Contains(m.table.Owners(place(device)), owner) {
				t.Errorf("%s was promised to %q, and is held by %q", device, owner, m.table.Owners(place(device)))
			}
		}
	}
}

// holdsNoMore checks, when no disk hangs and no call is in progress, that nothing is held without
// an OK.
func (m *model) holdsNoMore(t *rapid.T) {
	m.undoing = nil
	for _, device := range devices {
		for _, owner := range m.table.Owners(place(device)) {
			if !m.wasBusy[device] && !m.mayHold[owner][device] {
				t.Errorf("%s is held by %q, but no call of it succeeded", device, owner)
			}
		}
	}
}

// letGo makes every disk answer, and waits for the end of every call.
func (m *model) letGo() {
	m.kernel.change(func() {
		clear(m.kernel.hung)
		clear(m.kernel.busy)
		clear(m.kernel.faulty)
	})
	time.Sleep(time.Minute)
	synctest.Wait()
}

// end removes everything.
func (m *model) end(t *rapid.T) {
	m.letGo()
	m.holds(t)
	for _, container := range containers {
		m.last(t, "remove "+container, func(ctx context.Context) error { return m.sandbox.RemoveContainer(ctx, container) })
	}
	m.last(t, "destroy", m.sandbox.Destroy)
	if left, _ := m.kernel.now(); len(left) != 0 {
		t.Errorf("after everything has gone these are mounted: %v", left)
	}
}

func (m *model) last(t *rapid.T, what string, do func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := do(ctx); err != nil {
		t.Errorf("%s, at the end: %v", what, err)
	}
}

// memoryFolder returns a directory, on a tmpfs if there is one, because a state file belongs on one
// and the test writes a hundred thousand.
func memoryFolder(t *testing.T) string {
	folder, err := os.MkdirTemp("/dev/shm", "model-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	return folder
}

// modelChecks times the steps per check that rapid makes by default are 100,000 steps.
const modelChecks = "3400"

// Several callers make calls with deadlines, give up, repeat calls and make them concurrently,
// while disks arrive late, hang, fail and are busy: see the table in package sandbox.
func TestCallsHoldWhatTheyPromise(t *testing.T) {
	checks := flag.Lookup("rapid.checks")
	if checks.Value.String() == checks.DefValue {
		if err := flag.Set("rapid.checks", modelChecks); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = flag.Set("rapid.checks", checks.DefValue) })
	}
	steps, runs, folder := 0, 0, memoryFolder(t)
	rapid.Check(t, func(t *rapid.T) {
		rapid.SyncTest(t, func(t *rapid.T) {
			runs++
			m := newModel(t, filepath.Join(folder, fmt.Sprint(runs)))
			defer func() { m.undo(); m.state.Close() }()
			defer m.letGo() // rapid leaves an unusable sequence by a panic
			for _, device := range devices[:2] {
				m.kernel.plugged[device] = true
			}
			step := func(do func(*rapid.T)) func(*rapid.T) {
				return func(t *rapid.T) { steps++; do(t) }
			}
			t.Repeat(map[string]func(*rapid.T){
				"":       m.holds,
				"create": step(m.create), "create too": step(m.create), "create also": step(m.create), "remove": step(m.remove), "destroy": step(m.destroy),
				"create sandbox": step(m.createSandbox), "cut": step(m.cut), "cut too": step(m.cut), "give up": m.giveUp, "wait": step(m.wait), "unmount behind its back": step(m.foreignUnmount),
				"plug": step(m.flip(func(k *kernel) map[string]bool { return k.plugged })),
				"hang": step(m.flip(func(k *kernel) map[string]bool { return k.hung })),
				"busy": step(m.flip(func(k *kernel) map[string]bool { return k.busy })),
				"fail": step(m.flip(func(k *kernel) map[string]bool { return k.faulty })),
			})
			m.end(t)
		})
	})
	t.Logf("%d steps", steps)
}
