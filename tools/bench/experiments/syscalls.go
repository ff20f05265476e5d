package experiments

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/tools/bench/measure"
)

// The system calls of an agent's start and end do not belong to a call. So the agent is traced with
// few calls and with many, and the difference counts.
const fewCalls, manyCalls = 1000, 5000

var systemCalls = experiment{
	name: "system calls of the agent, on this host, over a unix socket",
	lines: []measure.Line{
		{Name: "agent_syscalls_per_call", Unit: "system calls", Goal: measure.AtMost(3), What: "the agent's system calls for each call that it answers, half Check, half GetVolumeStats"},
	},
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		volume, err := memoryFilesystem()
		if err != nil {
			return measure.Session{}, err
		}
		if _, err := exec.LookPath("strace"); err != nil {
			return measure.Session{}, measure.Unavailable("%w: install package strace", err)
		}
		if !takesServerAddress(ctx, l.agentProgram()) {
			return measure.Session{}, measure.Unavailable("%s has no flag -server-addr: it cannot listen on a unix socket", l.agentProgram())
		}
		t := tracer{agent: l.agentProgram(), dir: l.dir, volume: volume}
		return measure.Session{Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			few, err := t.count(ctx, fewCalls, say)
			if err != nil {
				return nil, err
			}
			many, err := t.count(ctx, manyCalls, say)
			return measure.Trial{"agent_syscalls_per_call": {float64(many-few) / (manyCalls - fewCalls)}}, err
		}}, nil
	},
}

// takesServerAddress reports whether the agent's help lists the flag for its address.
func takesServerAddress(ctx context.Context, agent string) bool {
	help, _ := exec.CommandContext(ctx, agent, "-help").CombinedOutput() // the exit status means nothing
	return bytes.Contains(help, []byte("-server-addr"))
}

// memoryFilesystem returns the mount point of a tmpfs with nothing mounted above or below it: a
// volume without a disk, so that the agent watches nothing.
func memoryFilesystem() (string, error) {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return "", err
	}
	at := map[string]int{}
	for _, m := range mounts {
		at[m.Mountpoint]++
	}
	for _, m := range mounts {
		var st unix.Statfs_t
		if m.FSType == "tmpfs" && at[m.Mountpoint] == 1 && unix.Statfs(m.Mountpoint, &st) == nil && st.Type == unix.TMPFS_MAGIC {
			return m.Mountpoint, nil
		}
	}
	return "", measure.Unavailable("no tmpfs is mounted on this host: mount one")
}

// tracer runs the agent under strace.
type tracer struct{ agent, dir, volume string }

// count returns the number of system calls of an agent that answers the given number of calls,
// including its start and its end.
func (t tracer) count(ctx context.Context, calls int, say func(string)) (int, error) {
	socket, summary := filepath.Join(t.dir, "agent.sock"), filepath.Join(t.dir, "strace.txt")
	os.Remove(socket)
	var output bytes.Buffer
	strace := exec.CommandContext(ctx, "strace", "-f", "-c", "-U", "name,calls", "-o", summary, t.agent, "-log", "error", "-server-addr", "unix://"+socket)
	strace.Stdout, strace.Stderr = &output, &output
	strace.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// Killing only strace would leave its child running, so the whole process group is killed.
	strace.Cancel = func() error { return unix.Kill(-strace.Process.Pid, unix.SIGKILL) }
	if err := strace.Start(); err != nil {
		return 0, err
	}
	err := t.call(ctx, socket, calls, say)
	if err == nil {
		err = endTraced(strace.Process.Pid)
	}
	if err != nil {
		strace.Cancel()
	}
	if waitErr := strace.Wait(); err == nil {
		err = waitErr
	}
	if err != nil {
		return 0, fmt.Errorf("%w\n%s", err, bytes.TrimSpace(output.Bytes()))
	}
	text, err := os.ReadFile(summary)
	if err != nil {
		return 0, err
	}
	return parseStrace(string(text))
}

// call waits until the agent listens, and makes the calls.
func (t tracer) call(ctx context.Context, socket string, calls int, say func(string)) error {
	client, err := dialSoon(ctx, address.Address{Scheme: address.Unix, Path: socket})
	if err != nil {
		return err
	}
	defer client.Close()
	return callAgent(ctx, client, t.volume, calls, say)
}

// dialInterval is the pause between attempts to reach an agent that does not listen yet: no event
// announces that it does.
const dialInterval = 10 * time.Millisecond

func dialSoon(ctx context.Context, to address.Address) (*agentclient.Client, error) {
	again := time.NewTicker(dialInterval)
	defer again.Stop()
	for {
		client, err := agentclient.Dial(ctx, to, agentclient.Config{})
		if err == nil {
			return client, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (%w)", ctx.Err(), err)
		case <-again.C:
		}
	}
}

// endTraced ends strace's child as a service manager does; strace then writes its summary.
func endTraced(strace int) error {
	path := fmt.Sprintf("/proc/%d/task/%d/children", strace, strace)
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	children := strings.Fields(string(text))
	if len(children) != 1 {
		return fmt.Errorf("%s: want the agent alone, got %q", path, text)
	}
	pid, err := strconv.Atoi(children[0])
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return unix.Kill(pid, unix.SIGTERM)
}

// parseStrace returns the total of a summary of strace -c -U name,calls.
func parseStrace(summary string) (int, error) {
	for text := range strings.Lines(summary) {
		if fields := strings.Fields(text); len(fields) == 2 && fields[0] == "total" {
			return strconv.Atoi(fields[1])
		}
	}
	return 0, errors.New("strace wrote no total")
}
