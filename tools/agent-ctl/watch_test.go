package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/program/programtest"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
)

type send = func(*volumepb.VolumeEvent) error

// watched serves WatchVolumes on a new socket, and returns its address.
func watched(t *testing.T, watch func(context.Context, send) error) string {
	t.Helper()
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	server.RegisterService(volumepb.VolumeServiceName, &ttrpc.ServiceDesc{Streams: map[string]ttrpc.Stream{
		"WatchVolumes": service.Stream(func(ctx context.Context, _ *volumepb.WatchVolumesRequest, send send) error { return watch(ctx, send) }),
	}})
	path := filepath.Join(t.TempDir(), "s")
	go server.Serve(context.Background(), listen(t, path))
	t.Cleanup(func() { server.Close() })
	return "unix://" + path
}

// withoutService serves nothing on a new socket, and returns its address.
func withoutService(t *testing.T) string {
	t.Helper()
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "s")
	go server.Serve(context.Background(), listen(t, path))
	t.Cleanup(func() { server.Close() })
	return "unix://" + path
}

// event makes an event of a volume.
func event(kind volumepb.VolumeEvent_Type, path string, change ...func(*volumepb.Volume)) *volumepb.VolumeEvent {
	e := &volumepb.VolumeEvent{Type: kind}
	if path != "" {
		e.Volume = &volumepb.Volume{VolumeGuestPath: path, Filesystem: "ext4", DeviceBytes: 2 << 30, FilesystemBytes: 1 << 30}
	}
	for _, c := range change {
		c(e.Volume)
	}
	return e
}

func growing(v *volumepb.Volume) {
	v.Growth = &volumepb.GrowVolumeProgress{From: 1 << 30, Now: 3 << 29, Goal: 2 << 30}
}

func broken(v *volumepb.Volume) {
	v.ReadOnly = true
	v.Conditions = []*volumepb.Condition{{Status: volumepb.Condition_INACCESSIBLE, Reason: "ReadOnly", Message: "e2fsck\x1b[2J"}, {Status: volumepb.Condition_DEGRADED, Reason: "RecordedErrors", Message: "errors"}}
}

// allEvents has an event of each type.
func allEvents(_ context.Context, send send) error {
	for _, e := range []*volumepb.VolumeEvent{
		event(volumepb.VolumeEvent_ADDED, "/a"), event(volumepb.VolumeEvent_RESYNCED, ""), event(volumepb.VolumeEvent_CHANGED, "/a", growing),
		event(volumepb.VolumeEvent_CHANGED, "/a", broken), event(volumepb.VolumeEvent_RESYNC, ""), event(volumepb.VolumeEvent_REMOVED, "/a"),
	} {
		if err := send(e); err != nil {
			return err
		}
	}
	return status.Error(codes.Unavailable, "the agent is ending")
}

func TestWatchWritesALineForEachEvent(t *testing.T) {
	got := ctl(t.Context(), "watch", "--server-address", watched(t, allEvents))
	same(t, "lines", `added /a: ext4, 1.0 GiB, healthy
resynced: these are all volumes
changed /a: ext4, 1.0 GiB, grows from 1.0 GiB to 2.0 GiB: 50%, healthy
changed /a: ext4, read-only, 1.0 GiB; INACCESSIBLE ReadOnly: e2fsck [2J; DEGRADED RecordedErrors: errors
resync: events were lost, all volumes follow
removed /a
`, got.Stdout)
	same(t, "exit", program.Failed, got.Exit)
	if !strings.Contains(got.Stderr, "the agent is ending") || strings.Contains(got.Stderr, "hybrid") {
		t.Errorf("want the agent's words\ngot  %s", got.Stderr)
	}
}

func TestWatchWritesEventsAsJSON(t *testing.T) {
	got := ctl(t.Context(), "watch", "--json", "--server-address", watched(t, allEvents))
	lines := strings.Split(got.Stdout, "\n")
	same(t, "lines", 7, len(lines))
	same(t, "resynced", `{"type":"RESYNCED"}`, lines[1])
	if !strings.HasPrefix(lines[2], `{"type":"CHANGED","volume":{"volume_guest_path":"/a","filesystem":"ext4"`) || !strings.Contains(lines[2], `"growth":{"now":1610612736,"from":1073741824,"goal":2147483648,"done":false}`) {
		t.Errorf("want an event with its growth\ngot  %s", lines[2])
	}
}

// terminal returns both ends of a new pseudo-terminal of 80 columns and 24 rows.
func terminal(t *testing.T) (ours, theirs *os.File) {
	t.Helper()
	ours, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err, ": a terminal takes devpts: mount -t devpts none /dev/pts")
	}
	number, err := unix.IoctlGetUint32(int(ours.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(ours.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(int(ours.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80})
	}
	if err == nil {
		theirs, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	return ours, theirs
}

// shows reads from a terminal until it has shown a text, and returns all that was read.
func shows(t *testing.T, ours *os.File, text string) string {
	t.Helper()
	var all []byte
	for piece := make([]byte, 4096); !strings.Contains(string(all), text); {
		n, err := ours.Read(piece)
		if err != nil {
			t.Fatalf("want %q\ngot  %q and %v", text, all, err)
		}
		all = append(all, piece[:n]...)
	}
	return string(all)
}

// The table is redrawn in place. Ctrl-C leaves it, with the cursor below it and no mode of the
// terminal changed.
func TestWatchRedrawsATableUntilCtrlC(t *testing.T) {
	ours, theirs := terminal(t)
	next := make(chan struct{})
	long := "/run/kata-containers/sandbox/storage/" + strings.Repeat("x", 40) + "MDIvMDE="
	address := watched(t, func(ctx context.Context, send send) error {
		for _, e := range []*volumepb.VolumeEvent{
			event(volumepb.VolumeEvent_ADDED, long), event(volumepb.VolumeEvent_RESYNCED, ""), event(volumepb.VolumeEvent_CHANGED, long, growing), event(volumepb.VolumeEvent_CHANGED, long, broken),
		} {
			if err := send(e); err != nil {
				return err
			}
			if e.Type != volumepb.VolumeEvent_ADDED {
				<-next
			}
		}
		<-ctx.Done()
		return ctx.Err()
	})
	ctx, ctrlC := context.WithCancel(t.Context())
	var stderr bytes.Buffer
	exit := make(chan int)
	go func() {
		exit <- program.Run(ctx, newRootCommand(), []string{"watch", "--server-address", address}, theirs, &stderr)
	}()
	first := shows(t, ours, "healthy\r\n\x1b[J")
	if !strings.HasPrefix(first, "\r\x1b[KVOLUME ") || !strings.Contains(first, "MDIvMDE=  ext4        1.0 GiB ") {
		t.Errorf("the first picture\nwant a table\ngot  %q", first)
	}
	next <- struct{}{}
	if grows := shows(t, ours, "healthy\r\n\x1b[J"); !strings.HasPrefix(grows, "\x1b[2A\r\x1b[K") || !strings.Contains(grows, "[#####-----]  50% to 2.0 GiB") {
		t.Errorf("a growth\nwant the table redrawn with a bar\ngot  %q", grows)
	}
	next <- struct{}{}
	last := shows(t, ours, "\x1b[J")
	for line := range strings.SplitSeq(last, "\r\x1b[K") {
		if len([]rune(strings.TrimSuffix(line, "\r\n\x1b[J"))) >= 80 {
			t.Errorf("a line wraps: %q", line)
		}
	}
	if !strings.Contains(last, "…") || !strings.Contains(last, "MDIvMDE=  ext4, read-only  1.0 GiB ") || !strings.HasSuffix(last, "\r\n\x1b[J") {
		t.Errorf("a fault\nwant its path cut on the left\ngot  %q", last)
	}
	ctrlC()
	same(t, "exit", program.Interrupted, <-exit)
	same(t, "words", "agent-ctl: interrupted\n", stderr.String())
	if all := first + last; strings.Contains(all, "\x1b[?") {
		t.Errorf("a mode of the terminal was changed: %q", all)
	}
}

// Volumes that were not sent again after a RESYNC are gone, and the table is not shown in between.
func TestTableForgetsWhatAResyncDoesNotName(t *testing.T) {
	table := newTable()
	for i, step := range []struct {
		event    *volumepb.VolumeEvent
		complete bool
		want     string
	}{
		{event(volumepb.VolumeEvent_ADDED, "/a"), false, "/a"},
		{event(volumepb.VolumeEvent_ADDED, "/b"), false, "/a /b"},
		{event(volumepb.VolumeEvent_RESYNCED, ""), true, "/a /b"},
		{event(volumepb.VolumeEvent_RESYNC, ""), false, "/a /b"},
		{event(volumepb.VolumeEvent_ADDED, "/c"), false, "/a /b /c"},
		{event(volumepb.VolumeEvent_ADDED, "/a"), false, "/a /b /c"},
		{event(volumepb.VolumeEvent_RESYNCED, ""), true, "/a /c"},
		{event(volumepb.VolumeEvent_REMOVED, "/a"), true, "/c"},
		{event(volumepb.VolumeEvent_REMOVED, "/c"), true, ""},
	} {
		same(t, fmt.Sprintf("step %d: complete", i), step.complete, table.apply(step.event))
		var paths []string
		for _, line := range table.lines(200) {
			if path, _, _ := strings.Cut(line, " "); strings.HasPrefix(path, "/") {
				paths = append(paths, path)
			}
		}
		same(t, fmt.Sprintf("step %d: volumes", i), step.want, strings.Join(paths, " "))
	}
	same(t, "no volume", "no volume is mounted", strings.Join(table.lines(80), "\n"))
}

func TestPercentOfAGrowthIsBounded(t *testing.T) {
	for want, g := range map[int]*volumepb.GrowVolumeProgress{
		0: {From: 5, Now: 4, Goal: 9}, 100: {From: 5, Now: 10, Goal: 9}, 25: {From: 4, Now: 5, Goal: 8}, 99: {From: 0, Now: 999, Goal: 1000},
	} {
		same(t, fmt.Sprint(g), want, percent(g))
	}
	same(t, "nothing to grow", 100, percent(&volumepb.GrowVolumeProgress{}))
}

func TestWatchSaysWhyItCannotBegin(t *testing.T) {
	path := filepath.Join(t.TempDir(), "h")
	serve(t, hybrid{listen(t, path), 1024}, "", empty)
	other := withoutService(t)
	for _, test := range []struct {
		args []string
		exit int
		says string
	}{
		{nil, program.WrongUsage, "--server-address is missing"},
		{[]string{"--server-address", "unix:///x", "--timeout", "0"}, program.WrongUsage, "--timeout 0s"},
		{[]string{"--server-address", "unix:///x", "more"}, program.WrongUsage, `"more"`},
		{[]string{"--server-address", "unix:///nowhere/s"}, program.Failed, "/nowhere/s"},
		{[]string{"--server-address", "unix://" + path, "--timeout", "1s"}, program.Failed, "--hybrid-vsock"},
		{[]string{"--server-address", other}, program.Failed, "(Unimplemented): a watch needs directvol's agent"},
	} {
		got := ctl(t.Context(), append([]string{"watch"}, test.args...)...)
		if got.Exit != test.exit || got.Stdout != "" || !strings.Contains(got.Stderr, test.says) {
			t.Errorf("%v\nwant %d and %q\ngot  %+v", test.args, test.exit, test.says, got)
		}
	}
	same(t, "interrupted", programtest.Result{Exit: program.Interrupted, Stderr: "agent-ctl: interrupted\n"}, func() programtest.Result {
		ctx, cancel := context.WithCancel(t.Context())
		return ctl(ctx, "watch", "--server-address", watched(t, func(context.Context, send) error { cancel(); <-t.Context().Done(); return nil }))
	}())
}
