package experiments

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// echoBytes is the length of an echo: about as much as a small call and its answer.
	echoBytes = 64
	// rounds is the number of rounds that one run measures, and warmUp the number of rounds before
	// the measurement.
	rounds, warmUp = 400, 40
)

// The echo is the floor of every round trip. Each experiment that needs the echo measures it again,
// in turn with its own rows.
var (
	echoLine = measure.Line{Name: "vsock_echo_rtt", Unit: "µs",
		What: "64 bytes to a thread in the guest that blocks in read and writes them back: the floor"}
	echoTailLine = measure.Line{Name: "vsock_echo_rtt" + tail, Unit: "µs", What: "the same, the 99th percentile of each run"}
)

var roundTrips = experiment{
	name:  "round trips: an echo, Check and GetVolumeStats in turn",
	lines: inTurnLines("", goals{}),
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		return l.openOurRoundTrips(ctx, measureInTurn)
	},
}

// A process that has just answered is not idle at once: Go's runtime looks for work for some
// milliseconds, and the agent for a second. In a guest with one processor that slows the next echo
// down, and makes the ratios above too good. So the three are also measured apart from each other,
// and these rows have the targets.
var roundTripsApart = experiment{
	name:  "round trips: the same, each after the last has gone quiet",
	lines: apartLines("", measure.AtMost(1.3), measure.AtMost(1.6)),
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		return l.openOurRoundTrips(ctx, measureApart)
	},
}

// apart is the suffix of rows that were measured apart, tail the suffix of 99th percentiles.
const apart, tail = "_apart", "_p99"

// goals are the goals for the medians and the 99th percentiles of Check and GetVolumeStats.
type goals struct{ check, stats, checkTail, statsTail measure.Goal }

// inTurnLines returns the rows of the echo and of the agent's calls, measured in turn. prefix
// begins the names of the calls' rows.
func inTurnLines(prefix string, g goals) []measure.Line {
	return []measure.Line{
		echoLine,
		callLine(prefix, "health_check_rtt", echoLine, g.check, "Health.Check"),
		callLine(prefix, "volume_stats_rtt", echoLine, g.stats, "GetVolumeStats of a mounted ext4 volume"),
		echoTailLine,
		callLine(prefix, "health_check_rtt"+tail, echoTailLine, g.checkTail, "Check, the 99th percentile of each run"),
		callLine(prefix, "volume_stats_rtt"+tail, echoTailLine, g.statsTail, "GetVolumeStats, the 99th percentile of each run"),
	}
}

// apartLines returns the same rows, measured apart.
func apartLines(prefix string, check, stats measure.Goal) []measure.Line {
	const how = ", while nothing else in the guest is busy"
	floor := measure.Line{Name: echoLine.Name + apart, Unit: echoLine.Unit, What: "the echo" + how}
	return []measure.Line{
		floor,
		callLine(prefix, "health_check_rtt"+apart, floor, check, "Check"+how),
		callLine(prefix, "volume_stats_rtt"+apart, floor, stats, "GetVolumeStats"+how),
	}
}

func callLine(prefix, name string, baseline measure.Line, g measure.Goal, what string) measure.Line {
	if prefix == kataPrefix {
		what = "kata-agent's " + what
	}
	return measure.Line{Name: prefix + name, Unit: "µs", Baseline: baseline.Name, Goal: g, What: what}
}

func (l *Setup) openOurRoundTrips(ctx context.Context, by roundTripMeasure) (measure.Session, error) {
	guest, err := l.theGuest(ctx)
	if err != nil {
		return measure.Session{}, err
	}
	to, err := agentAddress(guest)
	if err != nil {
		return measure.Session{}, err
	}
	return l.openRoundTrips(ctx, guest, to, "", by)
}

// roundTripMeasure measures the echo and the two calls, in microseconds. prefix begins the names of
// the rows.
type roundTripMeasure func(prefix string, calls []func() error, say func(string)) (measure.Trial, error)

// openRoundTrips sets up the measurement of the agent at an address, with a volume that our agent
// has mounted. prefix begins the names of the rows.
func (l *Setup) openRoundTrips(ctx context.Context, guest *vm.Guest, to address.Address, prefix string, by roundTripMeasure) (measure.Session, error) {
	volume, err := l.mountedDisk(ctx, guest)
	if err != nil {
		return measure.Session{}, err
	}
	return measure.Session{
		Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			e, err := dialEcho(ctx, guest)
			if err != nil {
				return nil, err
			}
			defer e.Close()
			client, err := agentclient.Dial(ctx, to, agentclient.Config{})
			if err != nil {
				return nil, err
			}
			defer client.Close()
			return by(prefix, []func() error{
				e.once,
				func() error { return client.Check(ctx) },
				func() error { _, err := client.GetVolumeStats(ctx, volume.GuestPath); return err },
			}, say)
		},
		Close: volume.remove,
	}, nil
}

func measureInTurn(prefix string, calls []func() error, say func(string)) (measure.Trial, error) {
	samples, err := inTurn(calls, rounds, func(round int) { say(fmt.Sprintf("round %d of %d", round, rounds)) })
	if err != nil {
		return nil, err
	}
	t := measure.Trial{}
	for i, name := range []string{echoLine.Name, prefix + "health_check_rtt", prefix + "volume_stats_rtt"} {
		t[name], t[name+tail] = samples[i], []float64{measure.Quantile(samples[i], 0.99)}
	}
	return t, nil
}

// quietAfter is how long a call is repeated before it is measured apart. By then the process that
// was called before is idle.
const quietAfter = 1500 * time.Millisecond

// measureApart measures each call in two blocks, once forward and once backward in order, so that a
// machine that becomes slower or faster within a run affects all calls alike. The two middle blocks
// are of the same call and become one block, because no other call comes before the second.
func measureApart(prefix string, calls []func() error, say func(string)) (measure.Trial, error) {
	t := measure.Trial{}
	names := []string{echoLine.Name, prefix + "health_check_rtt", prefix + "volume_stats_rtt"}
	for at, i := range []int{0, 1, 2, 1, 0} {
		say(names[i])
		blocks := 1
		if at == len(calls)-1 {
			blocks = 2
		}
		block, err := quietBlock(calls[i], blocks*rounds/2)
		if err != nil {
			return nil, err
		}
		t[names[i]+apart] = append(t[names[i]+apart], block...)
	}
	return t, nil
}

// quietBlock repeats one call, and measures it once the process that was called before is idle.
func quietBlock(call func() error, rounds int) ([]float64, error) {
	for began := time.Now(); time.Since(began) < quietAfter; {
		if err := call(); err != nil {
			return nil, err
		}
	}
	alone, err := inTurn([]func() error{call}, rounds, func(int) {})
	if err != nil {
		return nil, err
	}
	return alone[0], nil
}

// inTurn makes the calls one after the other, again and again, and returns the time of each, in
// microseconds.
func inTurn(calls []func() error, rounds int, progress func(round int)) ([][]float64, error) {
	defer quiet()()
	samples := make([][]float64, len(calls))
	for round := -warmUp; round < rounds; round++ {
		for i, call := range calls {
			began := time.Now()
			err := call()
			took := time.Since(began)
			if err != nil {
				return nil, err
			}
			if round >= 0 {
				samples[i] = append(samples[i], microseconds(took))
			}
		}
		if round%50 == 0 {
			progress(round)
		}
	}
	return samples, nil
}

// quiet stops this program's garbage collector, so that it does not disturb the measurement, until
// the returned function is called.
func quiet() (end func()) {
	runtime.GC()
	percent := debug.SetGCPercent(-1)
	return func() { debug.SetGCPercent(percent) }
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
func milliseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }

// echo is a connection to the guest's echo server.
type echo struct {
	net.Conn
	sent, got [echoBytes]byte
}

func dialEcho(ctx context.Context, guest *vm.Guest) (*echo, error) {
	conn, err := guest.Remote.BareEcho(ctx)
	if err != nil {
		return nil, err
	}
	return newEcho(ctx, conn), nil
}

// newEcho returns an echo on a connection. The echo ends with ctx's deadline.
func newEcho(ctx context.Context, conn net.Conn) *echo {
	if deadline, ok := ctx.Deadline(); ok {
		conn.SetDeadline(deadline) // fails only if the connection has ended, which the next call reports
	}
	e := &echo{Conn: conn}
	copy(e.sent[:], bytes.Repeat([]byte("echo"), echoBytes/4))
	return e
}

// once makes a round trip.
func (e *echo) once() error {
	if _, err := e.Write(e.sent[:]); err != nil {
		return fmt.Errorf("echo: %w", err)
	}
	if _, err := io.ReadFull(e, e.got[:]); err != nil {
		return fmt.Errorf("echo: %w", err)
	}
	if e.got != e.sent {
		return fmt.Errorf("echo: %q came back as %q", e.sent, e.got)
	}
	return nil
}

// several makes n round trips and returns the time of each, in microseconds.
func (e *echo) several(n int) ([]float64, error) {
	samples := make([]float64, n)
	for i := range samples {
		began := time.Now()
		if err := e.once(); err != nil {
			return nil, err
		}
		samples[i] = microseconds(time.Since(began))
	}
	return samples, nil
}
