package killed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// contextThatEnds returns a context that ends soon.
func contextThatEnds(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), 50*time.Millisecond)
}

func TestSeedChoosesARound(t *testing.T) {
	seen := map[string]bool{}
	for seed := range uint64(1000) {
		a, b := newRound(seed, ""), newRound(seed, "")
		if a.target != b.target || a.during != b.during || a.stops != b.stops || a.random.Uint64() != b.random.Uint64() {
			t.Fatalf("seed %d chooses two rounds", seed)
		}
		seen[fmt.Sprint(a.target, " during ", a.during)] = true
		if only := newRound(seed, hosting); only.target != hosting || only.during != a.during {
			t.Fatalf("seed %d: a target by hand changes more than that", seed)
		}
	}
	if want := len(targets) * len(awaited); len(seen) != want {
		t.Errorf("kinds of rounds\nwant %d\ngot  %d", want, len(seen))
	}
}

func TestRoundsThatKillTheAgentComeFirst(t *testing.T) {
	c := &campaign{settings: settings{seed: 7, count: 6, only: []target{qemu, agent}}}
	var order []string
	for _, r := range c.rounds() {
		order = append(order, fmt.Sprint(r.target, r.seed))
	}
	if want := []string{"agent8", "agent10", "agent12", "qemu7", "qemu9", "qemu11"}; !slices.Equal(order, want) {
		t.Errorf("\nwant %v\ngot  %v", want, order)
	}
}

func TestTableCountsEveryRound(t *testing.T) {
	c := counts{}
	v := &volume{growths: 3}
	c.add(&round{target: qemu, volumes: []*volume{v, v}, cut: []*flight{{request: request{Call: mount}}, {request: request{Call: resize}}}, rescued: 1, kills: 2}, nil)
	c.add(&round{target: qemu, left: []string{"a", "b"}, kills: 3}, fmt.Errorf("volume: %w", errLost))
	c.add(&round{target: vsock, ordered: true}, errors.New("other"))
	want := "| vsock | 1 | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 | 0 | 1 |\n" +
		"| qemu | 2 | 5 | 1 | 0 | 1 | 0 | 1 | 0 | 0 | 0 | 6 | 1 | 0 | 1 | 2 | 0 |\n" +
		"| all | 3 | 5 | 2 | 0 | 1 | 0 | 1 | 0 | 0 | 0 | 6 | 1 | 1 | 1 | 2 | 1 |\n"
	if got := c.table(); !strings.HasSuffix(got, want) {
		t.Errorf("\nwant %s\ngot  %s", want, got)
	}
}

func TestNoCallBeginsAfterTheKill(t *testing.T) {
	w := newWork(nil, newDurations(), attach, 0)
	if cut := w.end(); len(cut) != 0 {
		t.Errorf("calls in flight\nwant none\ngot  %v", cut)
	}
	if _, err := w.do(t.Context(), request{Call: attach}); !errors.Is(err, errOver) {
		t.Errorf("want %v\ngot  %v", errOver, err)
	}
	if len(w.begun) != 0 {
		t.Error("a call that was not made is counted")
	}
}
