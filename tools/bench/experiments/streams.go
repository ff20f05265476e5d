package experiments

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// streamedBytes is the number of bytes that go each way in one measurement, over all streams
	// together.
	streamedBytes = 32 << 20
	// streamBlock is the size of one write or read.
	streamBlock = 64 << 10
)

// The echo's streams share the guest's processors, the device's two queues and the backend's one
// thread. More streams must not make all streams together slower.
var streams = experiment{
	name: "streams at once: an echo's throughput with 1, 2, 4 and 8",
	lines: []measure.Line{
		streamLine(1, measure.Goal{}), streamLine(2, measure.Goal{}), streamLine(4, measure.Goal{}), streamLine(8, measure.AtLeast(0.9)),
	},
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		guest, err := l.theGuest(ctx)
		if err != nil {
			return measure.Session{}, err
		}
		return measure.Session{Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			t := measure.Trial{}
			for _, n := range []int{1, 2, 4, 8} {
				name := streamLine(n, measure.Goal{}).Name
				say(name)
				took, err := stream(ctx, guest, n)
				if err != nil {
					return nil, fmt.Errorf("%s: %w", name, err)
				}
				t[name] = []float64{streamedBytes / (1 << 20) / took.Seconds()}
			}
			return t, nil
		}}, nil
	},
}

func streamLine(n int, g measure.Goal) measure.Line {
	l := measure.Line{Name: fmt.Sprintf("vsock_%d_streams", n), Unit: "MiB/s", Goal: g,
		What: fmt.Sprintf("%d streams to an echo in the guest and back at once: each way, all together", n)}
	if !g.None() {
		l.Baseline = "vsock_2_streams"
	}
	return l
}

// stream sends streamedBytes over n streams, receives them back, and returns the duration.
func stream(ctx context.Context, guest *vm.Guest, n int) (time.Duration, error) {
	conns := make([]net.Conn, n)
	for i := range conns {
		conn, err := guest.Remote.Echo(ctx)
		if err != nil {
			return 0, err
		}
		defer conn.Close()
		if deadline, ok := ctx.Deadline(); ok {
			conn.SetDeadline(deadline) // fails only if the connection has ended, which the next call reports
		}
		conns[i] = conn
	}
	return timed(func() error {
		done := make(chan error, 2*n)
		for _, conn := range conns {
			go func() { done <- inBlocks(conn.Write, streamedBytes/n) }()
			go func() { done <- inBlocks(func(b []byte) (int, error) { return io.ReadFull(conn, b) }, streamedBytes/n) }()
		}
		var err error
		for range cap(done) {
			err = errors.Join(err, <-done)
		}
		return err
	})
}

// inBlocks moves size bytes with a read or a write that takes whole blocks.
func inBlocks(move func([]byte) (int, error), size int) error {
	block := make([]byte, streamBlock)
	for ; size > 0; size -= len(block) {
		if _, err := move(block); err != nil {
			return err
		}
	}
	return nil
}
