package sandbox

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/protocols/agentpb"
)

// A repeated create waits for its turn when the container is removed.
func TestRemoveEndsEveryCreateThatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := of(table{hold: func(ctx context.Context, _ func() bool) error { <-ctx.Done(); return ctx.Err() }})
		created := make(chan error, 3)
		for range 3 {
			go func() { created <- s.CreateContainer(t.Context(), "c1", nil, nil) }()
		}
		synctest.Wait()
		began := time.Now()
		if err := s.RemoveContainer(t.Context(), "c1"); err != nil || time.Since(began) > 0 {
			t.Errorf("remove\nwant OK at once\ngot  %v after %v", err, time.Since(began))
		}
		for range 3 {
			if err := <-created; errkind.Of(err) != errkind.FailedPrecondition {
				t.Errorf("create: %v", err)
			}
		}
	})
}

func TestShortCallSucceedsIfItNeedsNoWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := of(table{hold: func(_ context.Context, agreed func() bool) error {
			if !agreed() {
				return errors.New("not agreed")
			}
			return nil
		}})
		for range 100 {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			if err := s.CreateContainer(ctx, "c1", nil, nil); err != nil {
				t.Fatal(err)
			}
			cancel()
		}
	})
}

// A create whose storages fail undoes its earlier steps in reverse order.
func TestCreateThatFailsUndoesItsSteps(t *testing.T) {
	fails := errors.New("it fails")
	s := of(table{hold: func(context.Context, func() bool) error { return fails }})
	var did []string
	take := func(name string, err error) step {
		return func(context.Context) (func() error, error) {
			did = append(did, name)
			return func() error { did = append(did, "not "+name); return nil }, err
		}
	}
	if err := s.createSandbox(t.Context(), nil, take("a", nil), take("b", nil)); !errors.Is(err, fails) {
		t.Error(err)
	}
	if err := s.createContainer(t.Context(), "c1", nil, take("c", nil), take("d", fails), take("e", nil)); !errors.Is(err, fails) {
		t.Error(err)
	}
	if got, want := strings.Join(did, ", "), "a, b, not b, not a, c, d, not c"; got != want {
		t.Errorf("steps\nwant %s\ngot  %s", want, got)
	}
}

// table implements Storages with functions for some methods; the others do nothing.
type table struct {
	hold    func(ctx context.Context, agreed func() bool) error
	release func() error // nil returns at once
	check   func() error
}

func (t table) Hold(ctx context.Context, _ string, _ []*agentpb.Storage, agreed func() bool) error {
	return t.hold(ctx, agreed)
}

func (table) ReleaseAll(_ context.Context, agreed func() bool) error {
	if !agreed() {
		return errors.New("not agreed")
	}
	return nil
}
func (t table) Release(context.Context, string) error {
	if t.release == nil {
		return nil
	}
	return t.release()
}
func (table) UnmountEach(context.Context) error                { return nil }
func (table) Update(context.Context, []*agentpb.Storage) error { return nil }
func (table) Ended() bool                                      { return false }
func (table) Waiting(holders ...string) []string {
	if len(holders) > 0 && !slices.Contains(holders, "c1") {
		return nil
	}
	return []string{"/dev/hung at /hung"}
}
func (table) End(bool) error                                        { return nil }
func (table) AwaitDevices(context.Context, []*agentpb.Device) error { return nil }
func (t table) CheckReleased(context.Context, string, string) error { return t.check() }

func of(t table) *Sandbox {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return New(logrus.NewEntry(log), t)
}

func TestRemoveEndsACreateThatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := of(table{hold: func(ctx context.Context, _ func() bool) error { <-ctx.Done(); return ctx.Err() }})
		created := make(chan error, 1)
		go func() { created <- s.CreateContainer(t.Context(), "c1", nil, nil) }()
		synctest.Wait()
		began := time.Now()
		if err := s.RemoveContainer(t.Context(), "c1"); err != nil || time.Since(began) > 0 {
			t.Errorf("remove\nwant OK at once\ngot  %v after %v", err, time.Since(began))
		}
		if err := <-created; errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "it was removed while") {
			t.Errorf("create\nwant an error that says it was removed\ngot  %v", err)
		}
	})
}

func TestCallBehindAHungCallIsAnsweredInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := make(chan struct{})
		s := of(table{hold: func(context.Context, func() bool) error { <-answers; return errors.New("it answers") }})
		for range 5 { // the first call hangs, and the others wait for it
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			began := time.Now()
			err := s.CreateContainer(ctx, "c1", nil, nil)
			if errkind.Of(err) != errkind.DeadlineExceeded || ctx.Err() != nil || !strings.Contains(err.Error(), "a disk may not answer") {
				t.Errorf("want an error with the reason within its second\ngot  %v after %v", err, time.Since(began))
			}
			cancel()
		}
		began := time.Now()
		if err := s.Destroy(t.Context()); errkind.Of(err) != errkind.DeadlineExceeded || time.Since(began) > 4*time.Second || !strings.Contains(err.Error(), "/dev/hung at /hung") {
			t.Errorf("destroy beside it\nwant it refused, and soon, with the disk's name: others wait for it\ngot  %v after %v", err, time.Since(began))
		}
		if err := s.RemoveContainer(t.Context(), "other"); err != nil {
			t.Errorf("another container: %v", err)
		}
		close(answers)
	})
}

func TestCallWhoseCallerHasGoneHoldsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := make(chan bool, 1)
		s := of(table{hold: func(_ context.Context, agreed func() bool) error {
			time.Sleep(time.Minute)
			asked <- agreed()
			return errors.New("not agreed")
		}})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.CreateContainer(ctx, "c1", nil, nil); errkind.Of(err) != errkind.DeadlineExceeded {
			t.Errorf("got %v", err)
		}
		if <-asked {
			t.Error("it is held for a caller that got a failure")
		}
	})
}

func TestPanicEndsItsCallAlone(t *testing.T) {
	s := of(table{hold: func(context.Context, func() bool) error { panic("a bug") }})
	for range 2 { // the turn is free again
		if err := s.CreateContainer(t.Context(), "c1", nil, nil); err == nil || !strings.Contains(err.Error(), "the agent has a bug") {
			t.Errorf("want an error with the reason\ngot  %v", err)
		}
	}
}

// The error of a late call names the disk that the call waits for, whatever the call itself
// returns: umount(2) on a disk that hangs returns nothing.
func TestLateCallNamesItsDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := make(chan struct{})
		s := of(table{release: func() error { <-answers; return nil }})
		for range 2 { // one call hangs, and the other one waits for it
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if err := s.RemoveContainer(ctx, "c1"); errkind.Of(err) != errkind.DeadlineExceeded || ctx.Err() != nil || !strings.Contains(err.Error(), "(/dev/hung at /hung)") {
				t.Errorf("want it to name the disk, in time\ngot  %v", err)
			}
			cancel()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.RemoveContainer(ctx, "other"); errkind.Of(err) != errkind.DeadlineExceeded || strings.Contains(err.Error(), "/dev/hung") {
			t.Errorf("another container's call\nwant no disk that is not its own\ngot  %v", err)
		}
		close(answers)
	})
}

// An unmount may take as long as its caller waits, because a busy guest or a slow disk takes long.
// A caller without a deadline is answered within the usual time-out of a client.
func TestRemoveTakesAsLongAsItsCallerWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := of(table{release: func() error { time.Sleep(20 * time.Second); return nil }})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := s.RemoveContainer(ctx, "c1"); err != nil {
			t.Errorf("after 20 s of a minute\nwant OK\ngot  %v", err)
		}
		began := time.Now()
		if err := s.RemoveContainer(t.Context(), "c1"); errkind.Of(err) != errkind.DeadlineExceeded || time.Since(began) > releaseLimit {
			t.Errorf("caller without a limit\nwant an answer after %v at most\ngot  %v after %v", releaseLimit, err, time.Since(began))
		}
		time.Sleep(time.Minute)
	})
}

// CheckReleased for a container takes into account calls whose callers have given up.
func TestCheckReleasedWaitsForAbandonedCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ends, held, looked := make(chan struct{}), false, 0
		s := of(table{
			hold:  func(context.Context, func() bool) error { <-ends; held = true; return nil },
			check: func() error { looked++; return nil },
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.CreateContainer(ctx, "c1", nil, nil); errkind.Of(err) != errkind.DeadlineExceeded {
			t.Fatal(err)
		}
		for _, other := range []string{"other", ""} {
			if err := s.CheckReleased(t.Context(), other, "", ""); err != nil {
				t.Errorf("of container %q: %v", other, err)
			}
		}
		late, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.CheckReleased(late, "c1", "", ""); errkind.Of(err) != errkind.DeadlineExceeded || looked != 2 {
			t.Errorf("before its end\nwant DeadlineExceeded, and two looks\ngot  %v, and %d", err, looked)
		}
		close(ends)
		if err := s.CheckReleased(t.Context(), "c1", "", ""); err != nil || !held || looked != 3 {
			t.Errorf("when it has ended: %v, held %v, %d looks", err, held, looked)
		}
	})
}

func TestContainerIDsAreFileNames(t *testing.T) {
	s := of(table{hold: func(context.Context, func() bool) error { return nil }, check: func() error { return nil }})
	for id, fine := range map[string]bool{
		"c1": true, "0a1b-2_3.4": true, strings.Repeat("x", 255): true,
		"x": false, ".hidden": false, "..": false, "a/b": false, "a b": false, "a\n": false, "ä1": false, strings.Repeat("x", 256): false,
	} {
		for call, err := range map[string]error{
			"create": s.CreateContainer(t.Context(), id, nil, nil),
			"remove": s.RemoveContainer(t.Context(), id),
			"check":  s.CheckReleased(t.Context(), id, "", ""),
		} {
			if (err == nil) != fine || err != nil && errkind.Of(err) != errkind.InvalidArgument {
				t.Errorf("%s %.20q: fine %v\ngot error %v", call, id, fine, err)
			}
		}
	}
	if s.CreateContainer(t.Context(), "", nil, nil) == nil || s.RemoveContainer(t.Context(), "") == nil {
		t.Error("a container without an id")
	}
}

func TestTooLongContainerIDIsNamedAsTooLong(t *testing.T) {
	err := of(table{}).RemoveContainer(t.Context(), strings.Repeat("a", 256))
	if errkind.Of(err) != errkind.InvalidArgument || !strings.Contains(err.Error(), "255") {
		t.Errorf("want an InvalidArgument with 255\ngot  %v", err)
	}
}
