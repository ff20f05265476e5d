package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tools/agent-ctl/message"
)

// drawInterval is the shortest time between two pictures of the table.
const drawInterval = 100 * time.Millisecond

// watch holds the flags of the command watch.
type watch struct {
	place
	timeout time.Duration
	json    bool
}

func newWatchCommand() *cobra.Command {
	var w watch
	cmd := &cobra.Command{
		Use:   "watch --server-address URI",
		Short: "Show the volumes of a guest, and each change as it happens",
		Long: `watch shows the volumes that are mounted in the guest: their filesystems, sizes and conditions, and how
far a growth is. It needs directvol's agent.

In a terminal the table is redrawn when something changes. Elsewhere each change is a line, and with
--json an event of directvol.v1.VolumeService/WatchVolumes: ADDED, CHANGED or REMOVED with the volume;
RESYNC, when events were lost and all volumes follow as ADDED; and RESYNCED, when all have followed.

` + addresses + `
watch ends when the connection or the agent does, with exit status 1, and with 130 after Ctrl-C.`,
		Example: `  agent-ctl watch --server-address vsock://3:1024
  agent-ctl watch --server-address hvsock:///run/sb1/vsock.sock:1024 --json`,
		Args: w.place.args,
		RunE: func(cmd *cobra.Command, _ []string) error { return w.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	flags := cmd.Flags()
	w.place.flags(flags)
	flags.DurationVar(&w.timeout, "timeout", defaultTimeout, "limit connecting, and the first event, to `DURATION`")
	flags.BoolVar(&w.json, "json", false, "print one JSON object per event")
	complete(cmd, "timeout")
	return cmd
}

func (w *watch) run(ctx context.Context, out io.Writer) error {
	to, err := w.address()
	if err == nil && w.timeout <= 0 {
		err = fmt.Errorf("--timeout %v: want more than 0", w.timeout)
	}
	if err != nil {
		return program.Usage(err)
	}
	agent, err := agentclient.Dial(ctx, to, agentclient.Config{Timeout: w.timeout})
	if err != nil {
		return err
	}
	defer agent.Close()
	if screen := output.NewScreen(out); screen != nil && !w.json {
		return w.live(ctx, agent, to, screen)
	}
	return w.follow(ctx, agent, to, func(e *volumepb.VolumeEvent) error {
		line := eventLine(e)
		if w.json {
			line = string(message.JSON(e))
		}
		_, err := fmt.Fprintln(out, line)
		return err
	})
}

// errNoAnswer ends a watch that has not begun in time.
var errNoAnswer = errors.New("no event came in time")

// follow calls each for each event, until the watch or each fails. It returns that error.
func (w *watch) follow(ctx context.Context, agent *agentclient.Client, to address.Address, each func(*volumepb.VolumeEvent) error) error {
	limited, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	first := time.AfterFunc(w.timeout, func() { cancel(errNoAnswer) })
	defer first.Stop()
	begun := false
	for event, err := range agent.WatchVolumes(limited) {
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(context.Cause(limited), errNoAnswer):
			return fmt.Errorf("the connection to %s ended%s: no event within %v", to, hint(to), w.timeout)
		case err != nil && !begun && status.Code(err) == codes.Unavailable:
			return fmt.Errorf("%w%s", err, hint(to))
		case agentclient.LacksService(err):
			return fmt.Errorf("%w: a watch needs directvol's agent", err)
		case err != nil:
			return err
		}
		if !begun {
			begun = first.Stop()
		}
		if err := each(event); err != nil {
			return err
		}
	}
	return nil // cannot happen: a watch that ends has an error
}

// live keeps a table of the volumes on the screen.
func (w *watch) live(ctx context.Context, agent *agentclient.Client, to address.Address, screen *output.Screen) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events, ended := make(chan *volumepb.VolumeEvent), make(chan error, 1)
	go func() {
		ended <- w.follow(ctx, agent, to, func(e *volumepb.VolumeEvent) error {
			select {
			case events <- e:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	table := newTable()
	var due <-chan time.Time // when the table has changed and is to be drawn
	for {
		select {
		case e := <-events:
			if table.apply(e) && due == nil {
				due = time.After(drawInterval)
			}
		case <-due:
			due = nil
			if err := screen.Draw(table.lines(screen.Columns())); err != nil {
				return err
			}
		case err := <-ended:
			if due != nil {
				screen.Draw(table.lines(screen.Columns())) // the watch's error is the one to report
			}
			return err
		}
	}
}
