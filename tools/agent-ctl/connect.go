package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/program"
)

// defaultTimeout is the time-out that a runtime gives its longest call.
const defaultTimeout = 60 * time.Second

// forEver is the repeat count of a loop without an end.
const forEver = -1

// connection holds the flags of the command connect.
type connection struct {
	place
	commands     []string
	repeat       int
	interval     time.Duration
	timeout      time.Duration
	ignoreErrors bool
	json         bool
}

func newConnectCommand() *cobra.Command {
	var c connection
	cmd := &cobra.Command{
		Use:   "connect --server-address URI -c CALL [-c CALL …]",
		Short: "Connect to an agent and make calls",
		Long: `connect makes the calls named by -c, one after the other on one connection, and prints
their answers. A call that is answered with a stream has a connection of its own, and ends with
--timeout. A call is the name of a method and its request:

  -c Check                                        the empty request
  -c 'METHOD json://{"field":"value"}'            a request in JSON
  -c 'METHOD file:///path/request.json'           the same, from a file (file://name is relative)

Fields have the names that agent-ctl list shows. An enum is a name or a number, bytes are base64.
An unknown field is an error, before any call is made.

` + addresses + `
Answers go to the standard output. An error is printed with its gRPC code, on the standard error
or, with --json, in place of the answer. The first error ends the run, unless --ignore-errors is given.

The exit status is 0 when every call succeeded, 1 when something failed, 2 when the command line is
wrong, and 130 after Ctrl-C.`,
		Example: `  agent-ctl connect --server-address vsock://3:1024 -c Check -c GetGuestDetails
  agent-ctl connect --server-address vsock://3:1024 \
    -c 'GetVolumeStats json://{"volume_guest_path":"/run/kata-containers/sandbox/storage/MDIvMDE="}'
  agent-ctl connect --server-address unix:///run/vc/vm/ID/clh.sock --hybrid-vsock --hybrid-vsock-port 1024 -c Check
  agent-ctl connect --server-address hvsock:///run/sb1/vsock.sock:1024 --json --repeat 10 --interval 1s -c GetMetrics
  agent-ctl connect --server-address vsock://3:1024 --timeout 0 --repeat -1 -c GetOOMEvent`,
		Args: c.place.args,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.run(cmd.Context(), printer{cmd.OutOrStdout(), cmd.ErrOrStderr(), c.json})
		},
	}
	flags := cmd.Flags()
	c.place.flags(flags)
	flags.StringArrayVarP(&c.commands, "cmd", "c", nil, "`CALL` to make, see above; may be given several times")
	flags.IntVar(&c.repeat, "repeat", 1, "make all the calls `N` times; -1 repeats until Ctrl-C")
	flags.DurationVar(&c.interval, "interval", 0, "pause for `DURATION` before each repetition, such as 500ms")
	flags.DurationVar(&c.timeout, "timeout", defaultTimeout, "limit each call, and connecting, to `DURATION`; 0 means no limit")
	flags.BoolVar(&c.ignoreErrors, "ignore-errors", false, "continue after a failed call; the exit status is still 1")
	flags.BoolVar(&c.json, "json", false, `print one JSON object per call: {"method", "response"} or {"method", "error": {"code", "message"}}`)
	complete(cmd, "repeat", "interval", "timeout")
	return cmd
}

func (c *connection) run(ctx context.Context, out printer) error {
	to, err := c.address()
	if err == nil {
		err = c.check()
	}
	var calls []call
	if err == nil {
		calls, err = parseCalls(c.commands)
	}
	if err != nil {
		return program.Usage(err)
	}
	s, err := dial(ctx, to, c.timeout)
	if err != nil {
		return err
	}
	defer s.close()
	return c.rounds(ctx, s, calls, out)
}

func (c *connection) check() error {
	switch {
	case len(c.commands) == 0:
		return errors.New("no call: name a method with -c, such as -c Check")
	case c.repeat < 1 && c.repeat != forEver:
		return fmt.Errorf("--repeat %d: want 1 or more, or -1 for no end", c.repeat)
	case c.interval < 0:
		return fmt.Errorf("--interval %v: want 0 or more", c.interval)
	case c.timeout < 0:
		return fmt.Errorf("--timeout %v: want 0 (no limit) or more", c.timeout)
	default:
		return nil
	}
}

// rounds makes all calls, as many times as --repeat asks for.
func (c *connection) rounds(ctx context.Context, s *session, calls []call, out printer) error {
	var failed error
	for round := 0; c.repeat == forEver || round < c.repeat; round++ {
		if round > 0 {
			if err := pause(ctx, c.interval); err != nil {
				return err
			}
		}
		for _, call := range calls {
			st, err := c.make(ctx, s, call, out)
			if err != nil {
				return err
			}
			if st == nil {
				continue
			}
			failed = program.ErrReported
			if !c.ignoreErrors || s.ended() {
				return failed
			}
		}
	}
	return failed
}

// make makes a call and writes its answer: of a stream, each message when it arrives. It returns
// the status of the call's error, which is written too.
func (c *connection) make(ctx context.Context, s *session, call call, out printer) (*status.Status, error) {
	if !call.Streams {
		response, st := s.call(ctx, call)
		return st, out.answer(call, c.grown(ctx, s, call, response, st), st)
	}
	st, err := s.stream(ctx, call, func(message proto.Message) error { return out.answer(call, message, nil) })
	if err == nil && st != nil {
		err = out.answer(call, nil, st)
	}
	return st, err
}

// grown returns the answer to a call for people. The answer to ResizeVolume is empty, so grown
// returns the volume's statistics instead, if the agent has them. JSON output always has the answer
// itself.
func (c *connection) grown(ctx context.Context, s *session, of call, response proto.Message, st *status.Status) proto.Message {
	resize, ok := of.request.(*agentpb.ResizeVolumeRequest)
	if !ok || st != nil || c.json {
		return response
	}
	stats, err := findMethod("GetVolumeStats")
	if err != nil {
		panic(err) // cannot happen: it came from the wire
	}
	if found, st := s.call(ctx, call{stats, &agentpb.VolumeStatsRequest{VolumeGuestPath: resize.VolumeGuestPath}}); st == nil {
		return found
	}
	return response
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}
