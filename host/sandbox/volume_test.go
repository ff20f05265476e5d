package sandbox_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/protocols/agentpb"
)

// fine is a trial in which every store answers.
func fine(context.Context, string) error { return nil }

func over(w *world) *sandbox.Sandbox { return sandbox.New(machine{w}, agent{w}, fine) }

func TestAnyNameOf128BytesIsAVolume(t *testing.T) {
	s := over(newWorld())
	for _, id := range []string{"x", "/run/kata-containers/shared/direct-volumes/L3Zhci9saWI=", "pvc-6f0c7b3a-2a52-4b1d-9d8e-0f6a1f3f7f11", strings.Repeat("ü", 64), "a b\x00c"} {
		if err := s.Attach(t.Context(), sandbox.Volume{ID: id, Path: "/stores/" + id, FSType: "ext4"}); err != nil {
			t.Errorf("%q: %v", id, err)
		}
	}
	for _, id := range []string{"", strings.Repeat("x", 129)} {
		if err := s.Attach(t.Context(), sandbox.Volume{ID: id}); !errors.Is(err, sandbox.ErrInfeasible) || !strings.Contains(err.Error(), "volume id") {
			t.Errorf("%q\nwant it refused\ngot  %v", id, err)
		}
	}
}

// A serial number has at most 20 bytes (VIRTIO_BLK_ID_BYTES), a block node's name at most 31.
func TestDiskIDIsShortAndFollowsFromTheName(t *testing.T) {
	seen := map[string]string{}
	for _, id := range []string{"a", "b", "/run/a", "/run/a/", "pvc-1", "pvc-10", strings.Repeat("x", 128), strings.Repeat("x", 127)} {
		disk := sandbox.DiskID(id)
		if len(disk) > 20 || strings.Trim(disk, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
			t.Errorf("%.20q: %q", id, disk)
		}
		if other, ok := seen[disk]; ok {
			t.Errorf("%.20q and %.20q have one disk, %s", id, other, disk)
		}
		seen[disk] = id
	}
	if want, got := "dvzklycewkdo64v6wc", sandbox.DiskID("a"); got != want {
		t.Errorf("it changed, and disks of running machines are known by it\nwant %s\ngot  %s", want, got)
	}
}

func TestVolumeThatIsNotAttachedIsNotFound(t *testing.T) {
	s := over(newWorld())
	_, statsErr := s.Stats(t.Context(), "data")
	_, mountErr := s.Mount(t.Context(), "data")
	for call, err := range map[string]error{
		"stats": statsErr, "mount": mountErr, "unmount": s.Unmount(t.Context(), "data"), "resize": s.Resize(t.Context(), "data", 1),
	} {
		var e *sandbox.Error
		if !errors.Is(err, sandbox.ErrNotFound) || !errors.As(err, &e) || e.Volume != "data" || e.State != sandbox.Absent {
			t.Errorf("%s\nwant %v of data\ngot  %v", call, sandbox.ErrNotFound, err)
		}
	}
	if err := s.Detach(t.Context(), "data"); err != nil {
		t.Errorf("detach: %v", err)
	}
}

// tabled runs do in virtual time. within makes a call with the given time limit.
func tabled(t *testing.T, do func(w *world, s *sandbox.Sandbox, within func(time.Duration, func(context.Context) error) error)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		defer w.die()
		do(w, over(w), func(limit time.Duration, call func(context.Context) error) error {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			return call(ctx)
		})
	})
}

// bare is an agent that sees a directory where a volume was mounted.
type bare struct{ agent }

func (bare) GetVolumeStats(context.Context, string) (*agentpb.VolumeStatsResponse, error) {
	return nil, status.Error(codes.InvalidArgument, "not a mount point")
}

// The agent makes a directory before it mounts a volume, and removes it after the unmount. In
// between, its answer is INVALID_ARGUMENT and not NOT_FOUND.
func TestStatsOfAVolumeThatIsNotMountedIsNotFound(t *testing.T) {
	w := newWorld()
	s := sandbox.New(machine{w}, bare{agent{w}}, fine)
	if err := s.Attach(t.Context(), sandbox.Volume{ID: "data", Path: "/stores/data", FSType: "ext4"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Stats(t.Context(), "data"); !errors.Is(err, sandbox.ErrNotFound) || status.Code(err) != codes.InvalidArgument {
		t.Errorf("\nwant %v, with the agent's code\ngot  %v", sandbox.ErrNotFound, err)
	}
}

// A detach that timed out must not take the disk from under the next mount.
func TestDetachThatTimedOutTakesNoMountedDisk(t *testing.T) {
	tabled(t, func(w *world, s *sandbox.Sandbox, within func(time.Duration, func(context.Context) error) error) {
		v := sandbox.Volume{ID: "pvc-1", Path: storeOf("pvc-1"), FSType: "ext4"}
		attach := func(ctx context.Context) error { return s.Attach(ctx, v) }
		mount := func(ctx context.Context) error { _, err := s.Mount(ctx, v.ID); return err }
		detach := func(ctx context.Context) error { return s.Detach(ctx, v.ID) }
		if err := errors.Join(within(time.Second, attach), within(time.Second, mount)); err != nil {
			t.Fatal(err)
		}
		w.change(func() { w.stuck = true })
		if err := within(time.Second, detach); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, sandbox.ErrBusy) {
			t.Errorf("detach\nwant %v\ngot  %v", context.DeadlineExceeded, err)
		}
		if err := within(time.Second, mount); !errors.Is(err, sandbox.ErrBusy) {
			t.Errorf("mount\nwant %v\ngot  %v", sandbox.ErrBusy, err)
		}
		if err := within(time.Second, attach); !errors.Is(err, sandbox.ErrBusy) {
			t.Errorf("attach\nwant %v\ngot  %v", sandbox.ErrBusy, err)
		}
		w.change(func() {
			w.stuck = false
			for _, d := range w.disks {
				w.leave(d, false)
			}
		})
		if err := errors.Join(within(time.Second, attach), within(time.Second, mount)); err != nil {
			t.Errorf("after the guest's release: %v", err)
		}
		if len(w.broken) > 0 {
			t.Error(w.broken)
		}
	})
}

// If a guest refuses to release a disk, it keeps the disk, and the volume can be used.
func TestDiskThatTheGuestKeepsCanBeMountedAgain(t *testing.T) {
	tabled(t, func(w *world, s *sandbox.Sandbox, within func(time.Duration, func(context.Context) error) error) {
		attach := func(ctx context.Context) error { return s.Attach(ctx, volumeOf("c")) }
		detach := func(ctx context.Context) error { return s.Detach(ctx, "c") }
		mount := func(ctx context.Context) error { _, err := s.Mount(ctx, "c"); return err }
		w.keeps = true
		if err := within(time.Second, attach); err != nil {
			t.Fatal(err)
		}
		if err := within(time.Second, detach); !errors.Is(err, sandbox.ErrKept) || !errors.Is(err, sandbox.ErrBusy) {
			t.Errorf("detach\nwant %v\ngot  %v", sandbox.ErrKept, err)
		}
		if err := within(time.Second, mount); err != nil {
			t.Errorf("mount: %v", err)
		}
	})
}

// behind is a machine whose hotplug is blocked by another disk.
type behind struct {
	machine
	other *bool
}

func (b behind) Detach(ctx context.Context, id string) error {
	if *b.other {
		return errors.Join(sandbox.ErrStoreHangs, sandbox.ErrNotAsked)
	}
	return b.machine.Detach(ctx, id)
}

// A guest that was not asked to release a disk keeps the disk. A guest that was asked may release
// it at any moment.
func TestDiskThatTheGuestWasNotAskedForCanBeMountedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, other := newWorld(), true
		defer w.die()
		s := sandbox.New(behind{machine{w}, &other}, agent{w}, fine)
		detach := func() {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if err := s.Detach(ctx, "c"); !errors.Is(err, sandbox.ErrBusy) {
				t.Errorf("detach\nwant %v\ngot  %v", sandbox.ErrBusy, err)
			}
		}
		if err := s.Attach(t.Context(), volumeOf("c")); err != nil {
			t.Fatal(err)
		}
		detach()
		if err := s.Attach(t.Context(), volumeOf("c")); err != nil {
			t.Errorf("attach: %v", err)
		}
		if _, err := s.Mount(t.Context(), "c"); err != nil {
			t.Errorf("mount: %v", err)
		}
		w.change(func() { w.stuck, other = true, false })
		detach() // the first call asks the guest
		other = true
		detach()
		if _, err := s.Mount(t.Context(), "c"); !errors.Is(err, sandbox.ErrBusy) {
			t.Errorf("mount of a disk that the guest was asked for before\nwant %v\ngot  %v", sandbox.ErrBusy, err)
		}
	})
}

// staying is a machine that does not close the disks' Gone channels when it ends.
type staying struct{ machine }

func (s staying) Attach(ctx context.Context, d sandbox.Disk) (sandbox.Place, error) {
	place, err := s.machine.Attach(ctx, d)
	place.Gone = make(chan struct{})
	return place, err
}

func TestMachineThatHasEndedHasNoVolumes(t *testing.T) {
	tabled(t, func(w *world, _ *sandbox.Sandbox, within func(time.Duration, func(context.Context) error) error) {
		s := sandbox.New(staying{machine{w}}, agent{w}, fine)
		mountNow(t, s, within, "c")
		w.die()
		if err := within(time.Second, func(ctx context.Context) error { return s.Attach(ctx, volumeOf("c")) }); !errors.Is(err, sandbox.ErrEnded) {
			t.Errorf("attach\nwant %v\ngot  %v", sandbox.ErrEnded, err)
		}
		if state, all := s.State("c"), s.Volumes(); state != sandbox.Absent || len(all) > 0 {
			t.Errorf("want it absent\ngot  %v of %q", state, all)
		}
		if err := within(time.Second, func(ctx context.Context) error { return s.Detach(ctx, "c") }); err != nil {
			t.Errorf("detach: %v", err)
		}
	})
}

// A caller waits for another call on the same volume only until its own context ends.
func TestCallerThatWaitsForItsVolumeGivesUpInTime(t *testing.T) {
	tabled(t, func(w *world, s *sandbox.Sandbox, within func(time.Duration, func(context.Context) error) error) {
		w.hung[storeOf("pvc-1")] = true
		if err := within(time.Second, func(ctx context.Context) error { return s.Attach(ctx, volumeOf("pvc-1")) }); err != nil {
			t.Fatal(err)
		}
		go within(time.Hour, func(ctx context.Context) error { _, err := s.Mount(ctx, "pvc-1"); return err })
		synctest.Wait()
		began := time.Now()
		err := within(time.Second, func(ctx context.Context) error { return s.Detach(ctx, "pvc-1") })
		if !errors.Is(err, sandbox.ErrBusy) || !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != time.Second {
			t.Errorf("after %v\nwant %v\ngot  %v", time.Since(began), sandbox.ErrBusy, err)
		}
		if err := within(time.Second, func(ctx context.Context) error { return s.Attach(ctx, volumeOf("c")) }); err != nil {
			t.Errorf("another volume: %v", err)
		}
	})
}

// A disk that left by itself must be reported as lost, and can be attached again.
func TestDiskThatLeftIsLostUntilItIsAttachedAgain(t *testing.T) {
	tabled(t, func(w *world, s *sandbox.Sandbox, within func(time.Duration, func(context.Context) error) error) {
		v := volumeOf("pvc-1")
		attach := func(ctx context.Context) error { return s.Attach(ctx, v) }
		mount := func(ctx context.Context) error { _, err := s.Mount(ctx, v.ID); return err }
		if err := errors.Join(within(time.Second, attach), within(time.Second, mount)); err != nil {
			t.Fatal(err)
		}
		w.change(func() { w.leave(w.disks[v.DiskID()], true) })
		if got := s.State(v.ID); got != sandbox.Lost {
			t.Errorf("state\nwant %v\ngot  %v", sandbox.Lost, got)
		}
		if err := within(time.Second, mount); !errors.Is(err, sandbox.ErrLost) {
			t.Errorf("mount\nwant %v\ngot  %v", sandbox.ErrLost, err)
		}
		var stats *agentpb.VolumeStatsResponse
		err := within(time.Second, func(ctx context.Context) (err error) { stats, err = s.Stats(ctx, v.ID); return err })
		if err != nil || !stats.VolumeCondition.GetAbnormal() {
			t.Errorf("stats\nwant an abnormal condition\ngot  %v, %v", stats, err)
		}
		if err := errors.Join(within(time.Second, attach), within(time.Second, mount)); err != nil {
			t.Errorf("attached again: %v", err)
		}
	})
}

// The place of a lost disk must not be reused while anything in the guest is mounted there.
func TestLostDiskKeepsItsPlaceWhileOthersHoldIt(t *testing.T) {
	tabled(t, func(w *world, s *sandbox.Sandbox, within func(time.Duration, func(context.Context) error) error) {
		detach := func(ctx context.Context) error { return s.Detach(ctx, "c") }
		mountNow(t, s, within, "c")
		w.change(func() {
			for _, m := range w.mounts {
				m.holders[foreign] = true
			}
			w.leave(w.disks[sandbox.DiskID("c")], true)
		})
		if err := within(time.Second, detach); !errors.Is(err, sandbox.ErrBusy) {
			t.Errorf("with a holder\nwant %v\ngot  %v", sandbox.ErrBusy, err)
		}
		w.change(w.endForeign)
		if err := within(time.Second, detach); err != nil {
			t.Errorf("without: %v", err)
		}
	})
}

// mountNow attaches and mounts a volume.
func mountNow(t *testing.T, s *sandbox.Sandbox, within func(time.Duration, func(context.Context) error) error, name string) {
	t.Helper()
	err := within(time.Second, func(ctx context.Context) error {
		if err := s.Attach(ctx, volumeOf(name)); err != nil {
			return err
		}
		_, err := s.Mount(ctx, name)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A late answer of the agent may be about a place that meanwhile belongs to another volume.
func TestStatisticsAreNeverAnotherVolumes(t *testing.T) {
	for _, again := range []bool{false, true} {
		tabled(t, func(w *world, s *sandbox.Sandbox, within func(time.Duration, func(context.Context) error) error) {
			mountNow(t, s, within, "c")
			w.change(func() { w.slow = time.Minute })
			answer := make(chan error)
			go func() {
				answer <- within(time.Hour, func(ctx context.Context) error { _, err := s.Stats(ctx, "c"); return err })
			}()
			synctest.Wait()
			if err := within(time.Second, func(ctx context.Context) error { return s.Detach(ctx, "c") }); err != nil {
				t.Fatal(err)
			}
			mountNow(t, s, within, "pvc-1") // gets the same place
			if again {
				mountNow(t, s, within, "c")
			}
			if err := <-answer; !errors.Is(err, sandbox.ErrBusy) && !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("attached again: %v\nwant it refused\ngot  %v", again, err)
			}
		})
	}
}

// The store must be tried before the machine gets it, because a hanging store may block the
// machine.
func TestStoreThatHangsReachesNoMachine(t *testing.T) {
	w := newWorld()
	hangs := errors.New("no answer")
	s := sandbox.New(machine{w}, agent{w}, func(context.Context, string) error { return errors.Join(sandbox.ErrStoreHangs, hangs) })
	if err := s.Attach(t.Context(), volumeOf("pvc-1")); !errors.Is(err, sandbox.ErrStoreHangs) || !errors.Is(err, hangs) {
		t.Errorf("want %v\ngot  %v", sandbox.ErrStoreHangs, err)
	}
	if len(w.disks) > 0 || s.State("pvc-1") != sandbox.Absent {
		t.Errorf("the machine has %v, and the volume is %v", w.disks, s.State("pvc-1"))
	}
}

// silent is a machine that has a hanging disk.
type silent struct {
	machine
	hangs *error
}

func (s silent) Answers(context.Context, string) error { return *s.hangs }

// hangingDisk is a machine's error that names the disk that hangs.
type hangingDisk struct{ id string }

func (h hangingDisk) Error() string        { return "disk " + h.id + " hangs" }
func (h hangingDisk) HangingDisk() string  { return h.id }
func (h hangingDisk) Is(target error) bool { return target == sandbox.ErrStoreHangs }

// A machine must not be asked to close or grow a hanging store either, nor any other store if the
// machine would then block because of the hanging one. When the store answers again, the same calls
// must succeed.
func TestStoreThatHangsIsNeitherTakenAwayNorGrown(t *testing.T) {
	for _, whose := range []string{"pvc-1", "c"} {
		w := newWorld()
		var hangs error
		s := sandbox.New(silent{machine{w}, &hangs}, agent{w}, fine)
		for _, id := range []string{"pvc-1", "c"} {
			if err := s.Attach(t.Context(), volumeOf(id)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.Mount(t.Context(), "pvc-1"); err != nil {
			t.Fatal(err)
		}
		resize := func() error { return s.Resize(t.Context(), "pvc-1", 1<<30) }
		detach := func() error { return s.Detach(t.Context(), "pvc-1") }
		hangs = hangingDisk{sandbox.DiskID(whose)}
		for _, call := range []func() error{resize, detach} {
			err := call()
			if named := err != nil && strings.Contains(err.Error(), "volume "+whose); !errors.Is(err, sandbox.ErrStoreHangs) || !named {
				t.Errorf("want %v, and volume %s named\ngot  %v", sandbox.ErrStoreHangs, whose, err)
			}
		}
		if len(w.disks) != 2 || s.State("pvc-1") != sandbox.Attached {
			t.Errorf("the machine has %v, and the volume is %v", w.disks, s.State("pvc-1"))
		}
		if _, err := s.Mount(t.Context(), "pvc-1"); err != nil {
			t.Errorf("it is attached, and not mounted again: %v", err)
		}
		hangs = nil
		if err := errors.Join(resize(), detach()); err != nil {
			t.Errorf("when it answers: %v", err)
		}
		if len(w.disks) != 1 {
			t.Errorf("the machine still has %v", w.disks)
		}
	}
}

func TestOtherParametersAreRefused(t *testing.T) {
	tabled(t, func(w *world, s *sandbox.Sandbox, within func(time.Duration, func(context.Context) error) error) {
		v := volumeOf("pvc-1")
		for _, other := range []func(*sandbox.Volume){
			func(v *sandbox.Volume) {}, func(v *sandbox.Volume) { v.Path = "/stores/c" }, func(v *sandbox.Volume) { v.FSType = "xfs" },
			func(v *sandbox.Volume) { v.ReadOnly = true }, func(v *sandbox.Volume) { v.Options = []string{"noatime"} },
		} {
			want := v
			other(&want)
			err := within(time.Second, func(ctx context.Context) error { return s.Attach(ctx, want) })
			if same := want.Path == v.Path && want.FSType == v.FSType && !want.ReadOnly && want.Options == nil; same != (err == nil) || !same && !errors.Is(err, sandbox.ErrOtherParameters) {
				t.Errorf("%+v\nwant %v\ngot  %v", want, sandbox.ErrOtherParameters, err)
			}
		}
	})
}
