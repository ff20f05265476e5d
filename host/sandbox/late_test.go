package sandbox_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/protocols/agentpb"
)

// A call that was given up is carried out after the next call, which requests the opposite.
func TestAbandonedCallUndoesNoLaterCall(t *testing.T) {
	for _, noService := range []bool{false, true} {
		tabled(t, func(w *world, s *sandbox.Sandbox, within func(time.Duration, func(context.Context) error) error) {
			w.noService = noService
			mount := func(ctx context.Context) error { _, err := s.Mount(ctx, "c"); return err }
			unmount := func(ctx context.Context) error { return s.Unmount(ctx, "c") }
			detach := func(ctx context.Context) error { return s.Detach(ctx, "c") }
			isMounted := func(when string, want bool) {
				time.Sleep(2 * lateBy)
				synctest.Wait()
				w.mu.Lock()
				defer w.mu.Unlock()
				if got := len(w.mounts) > 0; got != want {
					t.Errorf("agent without a service: %v; mounted %s\nwant %v\ngot  %v", noService, when, want, got)
				}
			}
			givenUp := func(call func(context.Context) error) {
				w.change(func() { w.agentAnswers = lostLate })
				if err := within(time.Second, call); !errors.Is(err, sandbox.ErrOutcomeUnknown) {
					t.Errorf("want %v\ngot  %v", sandbox.ErrOutcomeUnknown, err)
				}
				w.change(func() { w.agentAnswers = comes })
			}
			fine := func(what string, call func(context.Context) error) {
				if err := within(time.Minute, call); err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
			mountNow(t, s, within, "c")
			givenUp(unmount)
			fine("mount behind an unmount", mount)
			isMounted("behind an unmount that came late", true)
			fine("unmount", unmount)
			givenUp(mount)
			fine("unmount behind a mount", unmount)
			isMounted("behind a mount that came late", false)
			givenUp(mount)
			fine("detach behind a mount", detach)
			isMounted("behind a detach", false)
			if len(w.broken) > 0 || len(w.disks) > 0 {
				t.Errorf("broken %q, disks %v", w.broken, w.disks)
			}
		})
	}
}

// hasty is an agent that carries out an abandoned create right after the next remove. No other call
// reveals that a create is still pending.
type hasty struct {
	agent
	late *func()
}

func (h hasty) CreateContainer(ctx context.Context, r *agentpb.CreateContainerRequest) error {
	*h.late = func() { h.change(func() { _ = h.mount(r.ContainerId, r.Storages[0]) }) }
	<-ctx.Done()
	return outcome(ctx.Err())
}

func (h hasty) RemoveContainer(ctx context.Context, id string) error {
	err := h.agent.RemoveContainer(ctx, id)
	if *h.late != nil {
		(*h.late)()
		*h.late = nil
	}
	return err
}

func TestDetachUndoesACreateThatArrivedAfterItsRemove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		defer w.die()
		late := func() {}
		s := sandbox.New(machine{w}, hasty{agent{w}, &late}, fine)
		if err := s.Attach(t.Context(), volumeOf("c")); err != nil {
			t.Fatal(err)
		}
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.Mount(short, "c"); !errors.Is(err, agentclient.ErrOutcomeUnknown) {
			t.Fatal(err)
		}
		if err := s.Detach(t.Context(), "c"); err != nil {
			t.Errorf("want nil\ngot  %v", err)
		}
	})
}
