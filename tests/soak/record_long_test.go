//go:build long

package soak

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// maxWrong is the maximum number of faults that are kept.
const maxWrong = 40

// late counts the calls that the agent has given up before their callers, for want of time.
const late = "calls that were not answered in time"

// record keeps what has happened. It is safe for concurrent use.
type record struct {
	from  *vm.Guest
	log   func(...any)
	began time.Time

	mu      sync.Mutex
	counts  map[string]uint64
	longest map[string]time.Duration // of the calls that have ended, by kind
	running map[*string]time.Time    // the calls in progress
	told    map[string]bool          // conditions that are among the wrongs
	wrongs  []string
}

func newRecord(t *testing.T, g *vm.Guest) *record {
	return &record{
		from: g, log: t.Log, began: time.Now(), counts: map[string]uint64{}, longest: map[string]time.Duration{}, running: map[*string]time.Time{}, told: map[string]bool{},
	}
}

func (r *record) elapsed() time.Duration { return time.Since(r.began).Round(time.Millisecond) }

func (r *record) add(what string, n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.counts[what] += n
}

// wrong records a fault. The test goes on, and fails at its end.
func (r *record) wrong(format string, arguments ...any) {
	text := fmt.Sprintf("after %v: ", r.elapsed()) + fmt.Sprintf(format, arguments...)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.counts["WRONG"]++
	if len(r.wrongs) < maxWrong {
		r.wrongs = append(r.wrongs, text)
		r.log(text)
	}
}

// call makes a call of volumes, and counts its result. A call that a lease refuses is repeated by
// its loop.
func (r *record) call(kind, of string, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(vmtest.JobLimit))
	defer cancel()
	name, begun := kind+" of "+of, time.Now()
	r.mu.Lock()
	r.running[&name] = begun
	r.mu.Unlock()
	err := do(ctx)
	took := time.Since(begun)
	r.mu.Lock()
	delete(r.running, &name)
	r.longest[kind] = max(r.longest[kind], took)
	r.mu.Unlock()
	switch {
	case err == nil:
		r.add(kind, 1)
	case status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), "ThawVolumes"):
		r.add(kind+", refused while frozen", 1)
	case status.Code(err) == codes.DeadlineExceeded && ctx.Err() == nil:
		// The guest has a single processor, and may be too busy to look at a mount in its time.
		// That is no condition, but it may happen rarely only.
		r.add(late, 1)
		r.log(fmt.Sprintf("after %v: %s, after %v: %v", r.elapsed(), name, took, err))
	default:
		r.wrong("%s, after %v: %v", name, took, err)
	}
	return err
}

// condition records conditions that a volume must not have, with all that may explain them.
func (r *record) condition(source, path string, conditions []*volumepb.Condition) {
	if len(conditions) == 0 {
		return
	}
	r.add("CONDITIONS", 1)
	key, said := source+path, ""
	for _, c := range conditions {
		key += " " + c.Status.String() + " " + c.Reason
		said += fmt.Sprintf("\n%v %s since %v: %s", c.Status, c.Reason, time.UnixMilli(c.SinceUnixMilliseconds).UTC(), c.Message)
	}
	r.mu.Lock()
	before := r.told[key]
	r.told[key] = true
	r.mu.Unlock()
	if !before {
		r.wrong("%s: %s has%s\n%s", source, path, said, r.circumstances())
	}
}

// circumstances returns what the guest and the host are doing.
func (r *record) circumstances() string {
	var text strings.Builder
	r.mu.Lock()
	for name, begun := range r.running {
		fmt.Fprintf(&text, "in progress for %v: %s\n", time.Since(begun).Round(time.Millisecond), *name)
	}
	r.mu.Unlock()
	load, err := os.ReadFile("/proc/loadavg")
	fmt.Fprintf(&text, "the host's load: %s, error %v\n", strings.TrimSpace(string(load)), err)
	ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(vmtest.CallLimit))
	defer cancel()
	for _, path := range []string{"/proc/loadavg", "/proc/pressure/io", "/proc/diskstats"} {
		content, err := r.from.Remote.ReadFile(ctx, path)
		fmt.Fprintf(&text, "the guest's %s, error %v:\n%s", path, err, content)
	}
	return text.String()
}

// String returns a line for each count, and for the longest call of each kind.
func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var text strings.Builder
	for _, what := range slices.Sorted(maps.Keys(r.counts)) {
		fmt.Fprintf(&text, "%12d %s", r.counts[what], what)
		if longest, ok := r.longest[what]; ok {
			fmt.Fprintf(&text, ", the longest %v", longest.Round(time.Millisecond))
		}
		text.WriteByte('\n')
	}
	return text.String()
}

// watch follows all volumes of the guest until the returned function is called.
func (s *soak) watch(t *testing.T) (end func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			s.add("watches", 1)
			for event, err := range s.client.WatchVolumes(ctx) {
				if err != nil {
					if ctx.Err() == nil {
						s.wrong("the watch has ended: %v", err)
					}
					break
				}
				s.add("events: "+event.Type.String(), 1)
				if event.Volume != nil {
					s.condition("an event", event.Volume.VolumeGuestPath, event.Volume.Conditions)
				}
			}
		}
	}()
	return func() { cancel(); <-ended }
}
