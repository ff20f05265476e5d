package volume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/state"
)

// frozenDisks takes the kernel's place: disks hang, which a loop device does not do.
type frozenDisks struct {
	t     *testing.T
	hangs map[string]chan struct{} // by mount point and system call, until it is closed

	mu     sync.Mutex
	frozen map[string]bool
}

// newDisks returns leases over disks that do not exist, and as many volumes of them.
func newDisks(t *testing.T, paths ...string) (*frozenDisks, *leases, []*Volume) {
	d := &frozenDisks{t: t, hangs: map[string]chan struct{}{}, frozen: map[string]bool{}}
	a := newLeases()
	a.kernel = kernel{open: func(v *Volume) (*os.File, error) { return os.Open(v.Mountpoint) }, sync: func(*os.File) error { return nil }, freeze: d.freeze, thaw: d.thaw}
	var volumes []*Volume
	own := t.TempDir()
	for i, path := range paths {
		path = filepath.Join(own, path)
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		volumes = append(volumes, &Volume{Mountpoint: path, FSType: "ext4", growing: make(chan struct{}, 1), identity: mount.Identity{ID: i + 1, Number: 1<<40 + uint64(i)}})
	}
	return d, a, volumes
}

func (d *frozenDisks) hang(v *Volume, call string) (answer func()) {
	answers := make(chan struct{})
	d.hangs[v.Mountpoint+call] = answers
	return func() { close(answers) }
}

func (d *frozenDisks) freeze(root *os.File) error {
	if answers := d.hangs[root.Name()+"freeze"]; answers != nil {
		<-answers
	}
	return d.set(root, true, filesystem.ErrFrozen)
}

func (d *frozenDisks) thaw(root *os.File) error {
	if answers := d.hangs[root.Name()+"thaw"]; answers != nil {
		<-answers
	}
	return d.set(root, false, filesystem.ErrNotFrozen)
}

func (d *frozenDisks) set(root *os.File, frozen bool, refusal error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.frozen[root.Name()] == frozen {
		return refusal
	}
	d.frozen[root.Name()] = frozen
	return nil
}

func (d *frozenDisks) want(when string, want map[*Volume]bool) {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for v, frozen := range want {
		if d.frozen[v.Mountpoint] != frozen {
			d.t.Errorf("%s: %s is frozen\nwant %v\ngot  %v", when, filepath.Base(v.Mountpoint), frozen, !frozen)
		}
	}
}

// A FIFREEZE that blocks cannot be taken back: what it does late is undone, and the other volumes
// do not wait for that.
func TestFreezeOfADiskThatHangsIsUndone(t *testing.T) {
	for limit, want := range map[time.Duration]time.Duration{5 * time.Second: 5 * time.Second, time.Hour: freezeLimit} {
		path := filepath.Join(t.TempDir(), "leases")
		file, err := state.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		synctest.Test(t, func(t *testing.T) {
			disks, leases, volumes := newDisks(t, "first", "hangs", "last")
			leases.state = file
			answer := disks.hang(volumes[1], "freeze")
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			began := time.Now()
			_, err := leases.take(ctx, volumes, nil)
			if errkind.Of(err) != errkind.DeadlineExceeded || !strings.Contains(err.Error(), "hangs") {
				t.Errorf("want DeadlineExceeded and the volume\ngot  %v", err)
			}
			if took := time.Since(began); took > want || took < want/2 {
				t.Errorf("answered after\nwant a little less than %v\ngot  %v", want, took)
			}
			disks.want("given up", map[*Volume]bool{volumes[0]: false, volumes[2]: false})
			if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), "hangs") {
				t.Errorf("want the volume in the file until it is thawed\ngot  %s, error %v", text, err)
			}
			late, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if err := volumes[1].lock(late); errkind.Of(err) != errkind.DeadlineExceeded {
				t.Errorf("want the volume locked until its freeze is undone\ngot  %v", err)
			}
			if err := volumes[0].lock(t.Context()); err != nil {
				t.Errorf("the first volume is not free again: %v", err)
			}
			answer()
			synctest.Wait()
			disks.want("it answers", map[*Volume]bool{volumes[1]: false})
			if err := volumes[1].lock(t.Context()); err != nil {
				t.Errorf("it is not free again: %v", err)
			}
			if text, err := os.ReadFile(path); err != nil || strings.Contains(string(text), "hangs") {
				t.Errorf("want no volume in the file\ngot  %s, error %v", text, err)
			}
		})
	}
}

func TestThawThatHangsKeepsNoOtherVolumeFrozen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disks, leases, volumes := newDisks(t, "first", "hangs", "last")
		table := &Table{leases: leases}
		for _, v := range volumes {
			v.watchers = &table.watchers
		}
		answer := disks.hang(volumes[1], "thaw")
		l, err := table.leases.take(t.Context(), volumes, nil)
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		began := time.Now()
		go func() {
			ended <- l.hold(t.Context(), maxLease, func(string, []FrozenVolume) error { return nil })
		}()
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if err := table.Thaw(ctx, l.name); errkind.Of(err) != errkind.DeadlineExceeded || ctx.Err() != nil {
				t.Errorf("want DeadlineExceeded before the deadline\ngot  %v, %v", err, ctx.Err())
			}
			cancel()
		}
		disks.want("one hangs", map[*Volume]bool{volumes[0]: false, volumes[1]: true, volumes[2]: false})
		err = <-ended
		if errkind.Of(err) != errkind.DeadlineExceeded || !strings.Contains(err.Error(), volumes[1].Mountpoint) || strings.Contains(err.Error(), volumes[0].Mountpoint) {
			t.Errorf("the stream\nwant DeadlineExceeded, and the volume that hangs\ngot  %v", err)
		}
		if took := time.Since(began); took != hungLimit {
			t.Errorf("the stream ends after\nwant %v\ngot  %v", hungLimit, took)
		}
		thawed := make(chan error, 1)
		go func() { thawed <- table.Thaw(t.Context(), l.name) }()
		synctest.Wait()
		answer()
		if err := <-thawed; err != nil {
			t.Errorf("called again, when it answers: %v", err)
		}
		disks.want("it answers", map[*Volume]bool{volumes[1]: false})
	})
}

func TestThawThatTheKernelRefusesIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disks, leases, volumes := newDisks(t, "only")
		refused := 0
		leases.kernel.thaw = func(root *os.File) error {
			if refused++; refused < 3 {
				return unix.EIO
			}
			return disks.thaw(root)
		}
		l, err := leases.take(t.Context(), volumes, nil)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		l.end(nil)
		<-l.thawed
		if took := time.Since(began); took != 2*thawAgain || l.result() != nil {
			t.Errorf("want it thawed after %v\ngot  %v, %v", 2*thawAgain, took, l.result())
		}
		disks.want("in the end", map[*Volume]bool{volumes[0]: false})
	})
}

// The lease of a caller that reads nothing ends in time, too.
func TestLeaseEndsAtItsTime(t *testing.T) {
	for _, length := range []time.Duration{minLease, time.Minute, maxLease} {
		synctest.Test(t, func(t *testing.T) {
			disks, leases, volumes := newDisks(t, "only")
			l, err := leases.take(t.Context(), volumes, nil)
			if err != nil {
				t.Fatal(err)
			}
			reads := make(chan struct{})
			ended := make(chan error, 1)
			go func() {
				ended <- l.hold(t.Context(), length, func(string, []FrozenVolume) error { <-reads; return nil })
			}()
			time.Sleep(length - time.Nanosecond)
			synctest.Wait()
			disks.want("shortly before its end", map[*Volume]bool{volumes[0]: true})
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			disks.want("at its end", map[*Volume]bool{volumes[0]: false})
			close(reads)
			if err := <-ended; errkind.Of(err) != errkind.Aborted {
				t.Errorf("want Aborted\ngot  %v", err)
			}
		})
	}
}

// A call that waits for the lock of a volume that is frozen meanwhile is refused at once.
func TestFreezeRefusesThoseThatWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disks, leases, volumes := newDisks(t, "only")
		answer := disks.hang(volumes[0], "freeze")
		taken := make(chan *lease, 1)
		go func() {
			l, err := leases.take(t.Context(), volumes, nil)
			if err != nil {
				t.Error(err)
			}
			taken <- l
		}()
		synctest.Wait()
		refused := make(chan error, 1)
		go func() { refused <- volumes[0].lock(t.Context()) }()
		synctest.Wait()
		answer()
		if err := <-refused; !errors.Is(err, errFrozen) || errkind.Of(err) != errkind.FailedPrecondition {
			t.Errorf("want it refused as frozen\ngot  %v", err)
		}
		(<-taken).end(nil)
	})
}

// TestLeasesInAnyOrder makes random calls at once, on volumes that each call names in another
// order. No call waits for ever, no volume is frozen twice, and none stays frozen.
func TestLeasesInAnyOrder(t *testing.T) {
	for seed := range uint64(200) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			disks, leases, volumes := newDisks(t, "a", "b", "c", "d")
			var wait sync.WaitGroup
			for range 8 {
				named := make([]*Volume, 0, len(volumes))
				for _, i := range random.Perm(len(volumes))[:1+random.IntN(len(volumes))] {
					named = append(named, volumes[i])
				}
				begins, length, gives := time.Duration(random.IntN(20)), time.Duration(1+random.IntN(20)), time.Duration(random.IntN(30))
				way := random.IntN(4)
				wait.Go(func() { oneLease(t, disks, leases, named, way, begins, length, gives) })
			}
			wait.Wait()
			synctest.Wait()
			free := map[*Volume]bool{}
			for _, v := range volumes {
				free[v] = false
				if len(v.growing) > 0 || v.frozen != nil {
					t.Errorf("seed %d: %s is not free", seed, v.Mountpoint)
				}
			}
			disks.want(fmt.Sprintf("seed %d", seed), free)
			if len(leases.all) > 0 {
				t.Errorf("seed %d: leases are left: %v", seed, maps.Collect(maps.All(leases.all)))
			}
		})
	}
}

// oneLease makes one call of TestLeasesInAnyOrder.
func oneLease(t *testing.T, disks *frozenDisks, leases *leases, named []*Volume, way int, begins, length, gives time.Duration) {
	time.Sleep(begins)
	if way == 3 { // as an unmount
		done, err := named[0].aloneAndThawed(t.Context())
		if err != nil {
			t.Error(err)
			return
		}
		disks.want("to be unmounted", map[*Volume]bool{named[0]: false})
		time.Sleep(length)
		done()
		return
	}
	l, err := leases.take(t.Context(), named, nil)
	if err != nil {
		if !errors.Is(err, errFrozen) {
			t.Error(err)
		}
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), gives)
	defer cancel()
	err = l.hold(ctx, length, func(string, []FrozenVolume) error {
		if way == 2 {
			l.end(nil)
		}
		return nil
	})
	if way == 2 && err != nil && errkind.Of(err) != errkind.Aborted && ctx.Err() == nil {
		t.Error(err)
	}
}

// A signal ends the call of a lease that is not complete yet. The process must not end before the
// volumes are thawed: perhaps no agent follows it.
func TestAgentDoesNotEndDuringAFreeze(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disks, leases, volumes := newDisks(t, "first", "slow")
		table := &Table{leases: leases}
		answer := disks.hang(volumes[1], "freeze")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { _, err := leases.take(ctx, volumes, nil); ended <- err }()
		synctest.Wait()
		disks.want("during the freeze", map[*Volume]bool{volumes[0]: true})
		cancel()
		<-ended
		time.AfterFunc(time.Second, answer)
		table.EndLeases()
		disks.want("at the agent's end", map[*Volume]bool{volumes[0]: false, volumes[1]: false})
	})
}

// A freeze that begins, or is not complete, while the agent ends is given up.
func TestNoLeaseBeginsWhenTheAgentEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disks, leases, volumes := newDisks(t, "first", "slow")
		table := &Table{leases: leases}
		answer := disks.hang(volumes[1], "freeze")
		ended := make(chan error, 1)
		go func() { _, err := leases.take(t.Context(), volumes, nil); ended <- err }()
		synctest.Wait()
		time.AfterFunc(time.Second, answer)
		table.EndLeases()
		disks.want("at the agent's end", map[*Volume]bool{volumes[0]: false, volumes[1]: false})
		if err := <-ended; errkind.Of(err) != errkind.Aborted {
			t.Errorf("the freeze in progress\nwant Aborted\ngot  %v", err)
		}
		if _, err := leases.take(t.Context(), volumes[:1], nil); errkind.Of(err) != errkind.Aborted {
			t.Errorf("a later freeze\nwant Aborted\ngot  %v", err)
		}
		disks.want("after the agent's end", map[*Volume]bool{volumes[0]: false})
	})
}
