package volumes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

const giB = 1 << 30

// client returns a client of the agent's, beside the sandbox's own.
func client(t *testing.T, g *vm.Guest) *agentclient.Client {
	t.Helper()
	to, err := address.Parse(g.VM().AgentAddress())
	must(t, err)
	c := agentclient.New(to, agentclient.Config{Vsock: g.VM()})
	t.Cleanup(func() { c.Close() })
	return c
}

// watcher keeps what a watch yields.
type watcher struct {
	mu     sync.Mutex
	events []*volumepb.VolumeEvent
	err    error
	news   chan struct{} // is closed at the next event and at the watch's end
	ended  bool
	read   int // events that await has returned or skipped
}

// watch begins a watch, and returns when all volumes have been sent. The watch ends with the test.
func watch(t *testing.T, g *vm.Guest) *watcher {
	t.Helper()
	w := &watcher{news: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	c := client(t, g)
	go func() {
		defer close(ended)
		for event, err := range c.WatchVolumes(ctx) {
			w.mu.Lock()
			if w.err = err; err == nil {
				w.events = append(w.events, event)
			} else {
				w.ended = true
			}
			close(w.news)
			w.news = make(chan struct{})
			w.mu.Unlock()
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	w.await(t, "all volumes", func(e *volumepb.VolumeEvent) bool { return e.Type == volumepb.VolumeEvent_RESYNCED })
	return w
}

// await returns the next event that is wanted.
func (w *watcher) await(t *testing.T, name string, wanted func(*volumepb.VolumeEvent) bool) *volumepb.VolumeEvent {
	t.Helper()
	ctx := limited(t)
	for {
		w.mu.Lock()
		for w.read < len(w.events) {
			e := w.events[w.read]
			w.read++
			if wanted(e) {
				w.mu.Unlock()
				return e
			}
		}
		news, ended, err := w.news, w.ended, w.err
		w.mu.Unlock()
		if ended {
			t.Fatalf("%s: the watch has ended: %v", name, err)
		}
		select {
		case <-news:
		case <-ctx.Done():
			t.Fatalf("%s: no such event came, but\n%s", name, w)
		}
	}
}

// String returns all events so far, one a line.
func (w *watcher) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var text strings.Builder
	for _, e := range w.events {
		fmt.Fprintln(&text, e)
	}
	return text.String()
}

// of selects events of a volume.
func of(v *vm.Volume, kind volumepb.VolumeEvent_Type, has func(*volumepb.Volume) bool) func(*volumepb.VolumeEvent) bool {
	path := v.GuestPath
	return func(e *volumepb.VolumeEvent) bool {
		return e.Type == kind && e.Volume.VolumeGuestPath == path && has(e.Volume)
	}
}

func always(*volumepb.Volume) bool { return true }

func hasReason(reason string) func(*volumepb.Volume) bool {
	return func(v *volumepb.Volume) bool {
		return slices.ContainsFunc(v.Conditions, func(c *volumepb.Condition) bool { return c.Reason == reason })
	}
}

func hasNoCondition(v *volumepb.Volume) bool { return len(v.Conditions) == 0 }

// large returns a mounted ext4 of 1 GiB on a disk of a larger size. The images are sparse.
func large(t *testing.T, g *vm.Guest, size uint64) *vm.Volume {
	t.Helper()
	v, err := g.Volume(limited(t), fmt.Sprintf("large-%d", volumes.Add(1)), "ext4", giB)
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
		defer cancel()
		if err := v.Detach(ctx); err != nil {
			t.Error(err)
			return
		}
		fsck, err := vm.Check(ctx, "ext4", v.Path)
		if err = errors.Join(err, fsck.Err("ext4")); err != nil {
			t.Errorf("after the test: %v", err)
		}
	})
	must(t, v.Mount(limited(t)))
	must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), size))
	return v
}

// A volume's life, as a watcher on the host sees it: mounted, grown in steps of 16 GiB, on a disk
// that hangs and answers again, unmounted.
func TestWatchFollowsAVolumesLife(t *testing.T) {
	const goal = 100 * giB
	g := guest(t)
	w := watch(t, g)
	v := large(t, g, goal)
	added := w.await(t, "the mount", of(v, volumepb.VolumeEvent_ADDED, always)).Volume
	if added.Filesystem != "ext4" || added.ReadOnly || len(added.Devices) != 1 {
		t.Errorf("added\nwant an ext4 on one device\ngot  %v", added)
	}
	if !added.Owned { // the mount is seen before its call ends
		w.await(t, "its owner", of(v, volumepb.VolumeEvent_CHANGED, func(v *volumepb.Volume) bool { return v.Owned }))
	}

	var steps []uint64
	must(t, client(t, g).GrowVolume(within(t, jobLimit), v.GuestPath, goal, func(p *volumepb.GrowVolumeProgress) {
		if p.Goal != goal || p.From > giB || p.Now > goal || len(steps) > 0 && p.Now < steps[len(steps)-1] {
			t.Errorf("want growth from 1 GiB to 100 GiB, step by step\ngot  %v", p)
		}
		steps = append(steps, p.Now)
	}))
	if distinct := len(slices.Compact(slices.Clone(steps))); distinct < 6 || steps[len(steps)-1] != goal {
		t.Errorf("steps of the call\nwant six or more, to %d\ngot  %v", uint64(goal), steps)
	}
	for last := uint64(0); last < 80*giB; {
		grows := w.await(t, "a step of the growth", of(v, volumepb.VolumeEvent_CHANGED, func(v *volumepb.Volume) bool { return v.Growth != nil })).Volume
		if now := grows.Growth.Now; now < last || now > max(last, giB)+17*giB {
			t.Errorf("a step from %d\nwant 16 GiB at most\ngot  %v", last, grows.Growth)
		}
		last = grows.Growth.Now
	}
	w.await(t, "the growth's end", of(v, volumepb.VolumeEvent_CHANGED, func(v *volumepb.Volume) bool {
		return v.Growth == nil && v.FilesystemBytes == goal && v.DeviceBytes == goal
	}))

	must(t, v.Hang(limited(t)))
	hung := w.await(t, "the hang", of(v, volumepb.VolumeEvent_CHANGED, hasReason("IOHung"))).Volume
	if c := hung.Conditions[0]; c.Status != volumepb.Condition_INACCESSIBLE || c.SinceUnixMilliseconds == 0 {
		t.Errorf("the condition\nwant INACCESSIBLE since a time\ngot  %v", c)
	}
	must(t, v.Answer())
	w.await(t, "the end of the hang", of(v, volumepb.VolumeEvent_CHANGED, hasNoCondition))
	must(t, v.Heal(limited(t)))
	gone := of(v, volumepb.VolumeEvent_REMOVED, always)
	must(t, v.Unmount(limited(t)))
	w.await(t, "the unmount", gone)
}

func TestWatchShowsAFaultAndItsRepair(t *testing.T) {
	g := guest(t)
	w := watch(t, g)
	v := mounted(t, g, "xfs")
	w.await(t, "the mount", of(v, volumepb.VolumeEvent_ADDED, always))
	writer := written(t, v, 0)
	must(t, v.BreakWrites(limited(t)))
	fails(t, writer)
	w.await(t, "the fault", of(v, volumepb.VolumeEvent_CHANGED, hasReason("Shutdown")))
	must(t, v.Heal(limited(t)))
	gone := of(v, volumepb.VolumeEvent_REMOVED, always)
	must(t, v.Unmount(limited(t)))
	w.await(t, "the unmount", gone)
	must(t, v.Mount(limited(t)))
	w.await(t, "the volume's return", of(v, volumepb.VolumeEvent_ADDED, hasNoCondition))
	isHealthy(t, v)
}

// A call that is given up after its first step leaves a filesystem between two steps. The same call
// continues.
func TestGrowthThatIsGivenUpStopsBetweenStepsAndGoesOn(t *testing.T) {
	const goal = 100 * giB
	g := guest(t)
	v := large(t, g, goal)
	c := client(t, g)
	ctx, cancel := context.WithCancel(within(t, jobLimit))
	err := c.GrowVolume(ctx, v.GuestPath, goal, func(p *volumepb.GrowVolumeProgress) {
		if p.Now > giB {
			cancel()
		}
	})
	if status.Code(err) != codes.Canceled {
		t.Fatalf("the call\nwant %v\ngot  %v", codes.Canceled, err)
	}
	// The agent learns of the caller's end by its connection, and stops before its next step.
	var stopped *volumepb.Volume
	must(t, vm.Again(limited(t), func() (bool, error) {
		stopped, err = c.GetVolume(limited(t), v.GuestPath)
		return err == nil && stopped.Growth == nil, err
	}))
	if end := stopped.FilesystemBytes; end <= giB || end >= goal {
		t.Errorf("the filesystem's end\nwant it between two steps\ngot  %d", end)
	}
	var first uint64
	must(t, c.GrowVolume(within(t, jobLimit), v.GuestPath, goal, func(p *volumepb.GrowVolumeProgress) {
		if first == 0 {
			first = p.From
		}
	}))
	if first != stopped.FilesystemBytes {
		t.Errorf("the second call continues from\nwant %d\ngot  %d", stopped.FilesystemBytes, first)
	}
	if got := end(t, g, v, 0, 0); got != goal {
		t.Errorf("the filesystem's end\nwant %d\ngot  %d", uint64(goal), got)
	}
}

func TestTwoGrowthsAtOnceAreOne(t *testing.T) {
	const goal = 60 * giB
	g := guest(t)
	v := large(t, g, goal)
	w := watch(t, g)
	type answer struct {
		last *volumepb.GrowVolumeProgress
		err  error
	}
	answers := make(chan answer)
	for range 2 {
		c, ctx := client(t, g), within(t, jobLimit)
		go func() {
			var a answer
			a.err = c.GrowVolume(ctx, v.GuestPath, goal, func(p *volumepb.GrowVolumeProgress) { a.last = p })
			answers <- a
		}()
	}
	for range 2 {
		if a := <-answers; a.err != nil || !a.last.Done || a.last.Now != goal {
			t.Errorf("an answer\nwant done at %d\ngot  %v, %v", uint64(goal), a.last, a.err)
		}
	}
	w.await(t, "the growth's end", of(v, volumepb.VolumeEvent_CHANGED, func(v *volumepb.Volume) bool { return v.Growth == nil && v.FilesystemBytes == goal }))
	begun := 0
	w.mu.Lock()
	events := slices.Clone(w.events)
	w.mu.Unlock()
	for _, e := range events {
		if e.Volume != nil && e.Volume.Growth != nil && e.Volume.Growth.Now == e.Volume.Growth.From {
			begun++
		}
	}
	if begun != 1 {
		t.Errorf("growths that have begun\nwant 1\ngot  %d in\n%s", begun, w)
	}
}

// A watcher whose connection ends, at any moment, leaves no thread and no goroutine in the agent.
func TestWatchersThatLeaveLeaveNothing(t *testing.T) {
	g := guest(t)
	mounted(t, g, "ext4")
	const goroutines, threads = "directvol_agent_goroutines", "directvol_agent_threads"
	leave := func(events int) {
		for _, err := range client(t, g).WatchVolumes(limited(t)) {
			must(t, err)
			if events--; events <= 0 {
				return
			}
		}
	}
	leave(1) // the agent has all the threads that a watch needs
	before := metrics(t, g)
	for i := range 40 {
		leave(i % 3)
	}
	must(t, vm.Again(limited(t), func() (bool, error) { return metrics(t, g)[goroutines] <= before[goroutines], nil }))
	if got := metrics(t, g)[threads]; got > before[threads]+4 {
		t.Errorf("threads after 40 watches\nwant about %v\ngot  %v", before[threads], got)
	}
}

// 256 mounts are listed and watched: of one disk, because a machine has fewer slots in this test.
func TestListHas256Volumes(t *testing.T) {
	const mounts = 256
	g := guest(t)
	v := mounted(t, g, "ext4")
	c := client(t, g)
	before, err := c.ListVolumes(limited(t))
	must(t, err)
	device := sizes(t, v).Device
	path := func(i int) string { return fmt.Sprintf("/run/test/many-%03d", i) }
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(jobLimit))
		defer cancel()
		for i := range mounts {
			if err := g.Remote.Unmount(ctx, path(i), 0); err != nil {
				t.Error(err)
			}
		}
	})
	for i := range mounts {
		must(t, g.Remote.Mkdir(limited(t), path(i), 0o755))
		must(t, g.Remote.Mount(limited(t), remote.Mount{Source: device, Target: path(i), FSType: "ext4"}))
	}
	after, err := c.ListVolumes(limited(t))
	must(t, err)
	if len(after) != len(before)+mounts || !slices.IsSortedFunc(after, func(a, b *volumepb.Volume) int { return strings.Compare(a.VolumeGuestPath, b.VolumeGuestPath) }) {
		t.Errorf("want %d volumes, sorted\ngot  %d", len(before)+mounts, len(after))
	}
	w := watch(t, g)
	w.mu.Lock()
	defer w.mu.Unlock()
	sent := map[string]bool{}
	for _, e := range w.events {
		if e.Volume != nil && strings.HasPrefix(e.Volume.VolumeGuestPath, path(0)[:len(path(0))-3]) {
			sent[e.Volume.VolumeGuestPath] = true
		}
	}
	if len(sent) != mounts {
		t.Errorf("a watch begins with\nwant %d of them\ngot  %d", mounts, len(sent))
	}
}

// The agent's end ends its watches with UNAVAILABLE.
func TestShutdownEndsAWatch(t *testing.T) {
	g := shared.Last(t)
	w := watch(t, g)
	must(t, g.Stop(limited(t)))
	for {
		w.mu.Lock()
		ended, err, news := w.ended, w.err, w.news
		w.mu.Unlock()
		if ended {
			refused(t, err, codes.Unavailable)
			return
		}
		select {
		case <-news:
		case <-limited(t).Done():
			t.Fatal("the watch has not ended")
		}
	}
}
