package killed

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/directvol/directvol/tests/vm"
)

// work is the activity in a guest until the kill.
type work struct {
	guest *guest
	took  *durations
	await call      // one call of this kind must be in flight at the kill
	skip  int       // but not one of the first ones
	begun chan bool // receives a value when that call has begun

	mu       sync.Mutex
	over     bool
	inFlight map[*flight]bool
}

// flight is a call without a known result.
type flight struct {
	request
	began time.Time
	err   error
}

func (f *flight) String() string {
	text := fmt.Sprintf("%s %s", f.Call, f.Volume.ID)
	if f.Call == resize {
		text += fmt.Sprintf(" to %d", f.Bytes)
	}
	return text
}

// errOver is the error of a call that was not made because the kill is near.
var errOver = errors.New("something is about to be killed")

func newWork(g *guest, took *durations, await call, skip int) *work {
	return &work{guest: g, took: took, await: await, skip: skip, begun: make(chan bool, 1), inFlight: map[*flight]bool{}}
}

// do makes a call, if it is not too late for it. An interrupted call also returns errOver.
func (w *work) do(ctx context.Context, r request) (answer, error) {
	f := &flight{request: r, began: time.Now()}
	w.mu.Lock()
	if w.over {
		w.mu.Unlock()
		return answer{}, errOver
	}
	w.inFlight[f] = true
	if r.Call == w.await {
		if w.skip == 0 {
			w.begun <- true
		}
		w.skip--
	}
	w.mu.Unlock()
	a, err := w.guest.do(ctx, r)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		f.err = err
		if err != nil {
			err = errOver
		}
		return a, err
	}
	w.took.add(r.Call, time.Since(f.began))
	delete(w.inFlight, f)
	return a, err
}

// end prevents further calls, and returns the calls in flight.
func (w *work) end() (cut []*flight) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	for f := range w.inFlight {
		cut = append(cut, f)
	}
	return cut
}

// keepGrowing grows a volume again and again under its writer, and asks for its statistics.
func (w *work) keepGrowing(ctx context.Context, v *volume, random *rand.Rand) error {
	writer := v.written[0].writer
	for range maxGrowths {
		if err := writer.Await(ctx, writer.Ledger().Bytes()+(1+random.Uint64N(8))*blockBytes); err != nil {
			return err
		}
		step := minStep + random.Uint64N((maxStep-minStep)/miB+1)*miB
		if _, err := w.do(ctx, request{Call: stats, Volume: v.Volume}); err != nil {
			return err
		}
		v.size += step
		if _, err := w.do(ctx, request{Call: resize, Volume: v.Volume, Bytes: v.size}); err != nil {
			return err
		}
		v.grown = v.size
		v.growths++
	}
	return nil
}

// visitBytes is the number of bytes written to the visitor.
const visitBytes = 2 * blockBytes

// visit attaches and detaches a volume again and again.
func (w *work) visit(ctx context.Context, v *volume, random *rand.Rand) error {
	for {
		if _, err := w.do(ctx, request{Call: attach, Volume: v.Volume}); err != nil {
			return err
		}
		for range 1 + random.IntN(2) {
			a, err := w.do(ctx, request{Call: mount, Volume: v.Volume})
			if err != nil {
				return err
			}
			v.path = a.Text
			written, err := v.write(ctx, w.guest, random.Uint64(), visitBytes)
			if err != nil {
				return err
			}
			if err := written.writer.Err(); err != nil {
				return err
			}
			if _, err := w.do(ctx, request{Call: unmount, Volume: v.Volume}); err != nil {
				return err
			}
		}
		if _, err := w.do(ctx, request{Call: detach, Volume: v.Volume}); err != nil {
			return err
		}
	}
}

// killWithin is the maximum time from the start of all writers to the kill, as a base for vm.Limit.
const killWithin = 500 * time.Millisecond

// moment returns at the moment of the kill: some time after the awaited call has begun; at any time
// if no call is awaited or none begins; or when a worker ends.
func (w *work) moment(ctx context.Context, random *rand.Rand, failed <-chan error) {
	any := time.NewTimer(time.Duration(random.Int64N(int64(vm.Limit(killWithin)))))
	share := random.Float64()
	if w.await != "" {
		any.Reset(vm.Limit(2 * killWithin))
	}
	defer any.Stop()
	select {
	case <-w.begun:
		any.Reset(time.Duration(share * float64(w.took.usual(w.await))))
		<-any.C
	case <-any.C:
	case <-failed:
	case <-ctx.Done():
	}
}

// durations are the durations of the calls in all rounds.
type durations struct {
	mu   sync.Mutex
	sums map[call]time.Duration
	n    map[call]int
}

func newDurations() *durations {
	return &durations{sums: map[call]time.Duration{}, n: map[call]int{}}
}

func (d *durations) add(c call, took time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sums[c] += took
	d.n[c]++
}

// firstGuess is the assumed duration of a call that was never made.
const firstGuess = 100 * time.Millisecond

// usual returns the mean duration of a call.
func (d *durations) usual(c call) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.n[c] == 0 {
		return firstGuess
	}
	return d.sums[c] / time.Duration(d.n[c])
}
