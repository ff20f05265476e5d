package metrics

import (
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
)

// Calls counts the calls of each method. Its zero value is ready.
type Calls struct {
	methods atomic.Pointer[map[string]*Method] // replaced as a whole, never modified
	adding  sync.Mutex
}

// Of returns the counts of a method. name must be fixed in the program, never taken from a caller.
// Of takes no lock if the method is known.
func (c *Calls) Of(name string) *Method {
	if m := c.known()[name]; m != nil {
		return m
	}
	c.adding.Lock()
	defer c.adding.Unlock()
	if m := c.known()[name]; m != nil {
		return m
	}
	more := map[string]*Method{name: {}}
	maps.Copy(more, c.known())
	c.methods.Store(&more)
	return more[name]
}

func (c *Calls) known() map[string]*Method {
	if methods := c.methods.Load(); methods != nil {
		return *methods
	}
	return nil
}

// lastCode is the largest gRPC code (codes.Unauthenticated).
const lastCode = codes.Unauthenticated

// bounds are the upper bounds of the histogram's buckets; one more bucket is unbounded.
var bounds = [...]time.Duration{time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond, time.Second, 10 * time.Second}

// Method is the counts of one method. Its zero value is ready.
type Method struct {
	codes   [lastCode + 1]atomic.Uint64
	buckets [len(bounds) + 1]atomic.Uint64
	nanos   atomic.Int64
}

// Count counts a call that was answered at once. It does not measure the duration, because reading
// the clock would cost as much as the answer.
func (m *Method) Count(code codes.Code) {
	if code > lastCode {
		code = codes.Unknown
	}
	m.codes[code].Add(1)
}

// Observe counts a call and its duration.
func (m *Method) Observe(code codes.Code, took time.Duration) {
	m.Count(code)
	bucket, _ := slices.BinarySearch(bounds[:], took) // a bucket includes its bound
	m.buckets[bucket].Add(1)
	m.nanos.Add(int64(took))
}

const (
	callsName    = "directvol_agent_calls_total"
	durationName = "directvol_agent_call_duration_seconds"
)

// Write adds the metric families of the methods that were called.
func (c *Calls) Write(t *Text) {
	methods := c.known()
	names := slices.Sorted(maps.Keys(methods))
	t.Family(callsName, Counter, "Answered calls, by method and gRPC status code.")
	for _, name := range names {
		m := methods[name]
		for code := range m.codes {
			if n := m.codes[code].Load(); n > 0 {
				t.Sample(callsName, float64(n), "method", name, "code", codes.Code(code).String())
			}
		}
	}
	t.Family(durationName, Histogram, "Duration of calls; calls that are answered at once are counted but not timed.")
	for _, name := range names {
		methods[name].writeDurations(t, name)
	}
}

// writeDurations computes the count from the buckets that it has read: calls end meanwhile, and
// count and buckets must agree.
func (m *Method) writeDurations(t *Text, method string) {
	var counts [len(m.buckets)]uint64
	var sum uint64
	for i := range m.buckets {
		sum += m.buckets[i].Load()
		counts[i] = sum
	}
	if sum == 0 {
		return
	}
	for i, bound := range bounds {
		t.Sample(durationName+"_bucket", float64(counts[i]), "method", method, "le", strconv.FormatFloat(bound.Seconds(), 'g', -1, 64))
	}
	t.Sample(durationName+"_bucket", float64(sum), "method", method, "le", "+Inf")
	t.Sample(durationName+"_sum", time.Duration(m.nanos.Load()).Seconds(), "method", method)
	t.Sample(durationName+"_count", float64(sum), "method", method)
}
