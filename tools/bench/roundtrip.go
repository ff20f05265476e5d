package main

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
)

const (
	// echoBytes is an echo's length: about what a small call and its answer have.
	echoBytes = 64
	// rounds are what one run measures, and warmUp what it makes before it looks at the clock.
	rounds, warmUp = 400, 40
)

// The echo is the floor under every round trip. Each experiment that needs it measures its own, in turn with its rows.
var (
	echoLine = line{name: "vsock_echo_rtt", unit: "µs",
		what: "64 bytes to a thread in the guest that blocks in read and writes them back: the floor"}
	echoTailLine = line{name: "vsock_echo_rtt" + tail, unit: "µs", what: "the same, the 99th percentile of each run"}
)

var roundTrips = experiment{
	name:  "round trips: an echo, Check and GetVolumeStats in turn",
	lines: inTurnLines("", goals{}),
	open: func(ctx context.Context, l *lab, _ int) (session, error) {
		return l.openOurRoundTrips(ctx, measureInTurn)
	},
}

// What has answered is not quiet at once: Go's runtime looks about for some milliseconds, the agent for a second, and in a guest with one processor
// that slows the next echo down, which flatters the ratios above. So the three are measured apart, too, and these have the targets.
var roundTripsApart = experiment{
	name:  "round trips: the same, each after the last has gone quiet",
	lines: apartLines("", atMost(1.3), atMost(1.6)),
	open: func(ctx context.Context, l *lab, _ int) (session, error) {
		return l.openOurRoundTrips(ctx, measureApart)
	},
}

// apart ends the names of rows that were measured apart, tail those of 99th percentiles.
const apart, tail = "_apart", "_p99"

// goals are those of Check and GetVolumeStats, their medians' and their 99th percentiles'.
type goals struct{ check, stats, checkTail, statsTail goal }

// inTurnLines are the echo and the calls of the agent whose rows' names begin with prefix.
func inTurnLines(prefix string, g goals) []line {
	return []line{
		echoLine,
		callLine(prefix, "health_check_rtt", echoLine, g.check, "Health.Check"),
		callLine(prefix, "volume_stats_rtt", echoLine, g.stats, "GetVolumeStats of a mounted ext4 volume"),
		echoTailLine,
		callLine(prefix, "health_check_rtt"+tail, echoTailLine, g.checkTail, "Check, the 99th percentile of each run"),
		callLine(prefix, "volume_stats_rtt"+tail, echoTailLine, g.statsTail, "GetVolumeStats, the 99th percentile of each run"),
	}
}

// apartLines are the same, measured apart.
func apartLines(prefix string, check, stats goal) []line {
	const how = ", while nothing else in the guest is busy"
	floor := line{name: echoLine.name + apart, unit: echoLine.unit, what: "the echo" + how}
	return []line{
		floor,
		callLine(prefix, "health_check_rtt"+apart, floor, check, "Check"+how),
		callLine(prefix, "volume_stats_rtt"+apart, floor, stats, "GetVolumeStats"+how),
	}
}

func callLine(prefix, name string, baseline line, g goal, what string) line {
	if prefix == kataPrefix {
		what = "kata-agent's " + what
	}
	return line{name: prefix + name, unit: "µs", baseline: baseline.name, goal: g, what: what}
}

func (l *lab) openOurRoundTrips(ctx context.Context, measure roundTripMeasure) (session, error) {
	guest, err := l.theGuest(ctx)
	if err != nil {
		return session{}, err
	}
	to, err := agentAddress(guest)
	if err != nil {
		return session{}, err
	}
	return l.openRoundTrips(ctx, guest, to, "", measure)
}

// roundTripMeasure measures the echo and the two calls, in microseconds. The rows' names begin with prefix.
type roundTripMeasure func(prefix string, calls []func() error, say func(string)) (trial, error)

// openRoundTrips measures the agent at an address, with a volume that ours has mounted. prefix is what its rows' names begin with.
func (l *lab) openRoundTrips(ctx context.Context, guest *vm.Guest, to address.Address, prefix string, measure roundTripMeasure) (session, error) {
	volume, err := l.mountedDisk(ctx, guest)
	if err != nil {
		return session{}, err
	}
	return session{
		run: func(ctx context.Context, say func(string)) (trial, error) {
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
			return measure(prefix, []func() error{
				e.once,
				func() error { return client.Check(ctx) },
				func() error { _, err := client.GetVolumeStats(ctx, volume.GuestPath); return err },
			}, say)
		},
		close: volume.remove,
	}, nil
}

func measureInTurn(prefix string, calls []func() error, say func(string)) (trial, error) {
	samples, err := inTurn(calls, rounds, func(round int) { say(fmt.Sprintf("round %d of %d", round, rounds)) })
	if err != nil {
		return nil, err
	}
	t := trial{}
	for i, name := range []string{echoLine.name, prefix + "health_check_rtt", prefix + "volume_stats_rtt"} {
		t[name], t[name+tail] = samples[i], []float64{quantile(samples[i], 0.99)}
	}
	return t, nil
}

// quietAfter is how long something is called before it is measured apart: what was called before it is quiet by then.
const quietAfter = 1500 * time.Millisecond

func measureApart(prefix string, calls []func() error, say func(string)) (trial, error) {
	t := trial{}
	for i, name := range []string{echoLine.name, prefix + "health_check_rtt", prefix + "volume_stats_rtt"} {
		say(name)
		for began := time.Now(); time.Since(began) < quietAfter; {
			if err := calls[i](); err != nil {
				return nil, err
			}
		}
		alone, err := inTurn(calls[i:i+1], rounds, func(int) {})
		if err != nil {
			return nil, err
		}
		t[name+apart] = alone[0]
	}
	return t, nil
}

// inTurn makes the calls one after the other, again and again, and returns how long each took, in microseconds.
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

// quiet keeps this program's garbage collector out of what is measured, until the end that it returns.
func quiet() (end func()) {
	runtime.GC()
	percent := debug.SetGCPercent(-1)
	return func() { debug.SetGCPercent(percent) }
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
func milliseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }

// echo is a connection to the guest's echo.
type echo struct {
	net.Conn
	sent, got [echoBytes]byte
}

func dialEcho(ctx context.Context, guest *vm.Guest) (*echo, error) {
	conn, err := guest.Act.BareEcho(ctx)
	if err != nil {
		return nil, err
	}
	return newEcho(ctx, conn), nil
}

// newEcho ends with ctx's deadline.
func newEcho(ctx context.Context, conn net.Conn) *echo {
	if deadline, ok := ctx.Deadline(); ok {
		conn.SetDeadline(deadline) // fails only where the connection is over, as the next call tells
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

// several makes some round trips and returns how long each took, in microseconds.
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
