package agentclient

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/ttrpcframe"
	"github.com/directvol/directvol/protocols/volumepb"
)

type (
	watchSend = func(*volumepb.VolumeEvent) error
	growSend  = func(*volumepb.GrowVolumeProgress) error
)

// serveStreams serves WatchVolumes and GrowVolume by functions; nil refuses.
func serveStreams(t *testing.T, watch func(context.Context, watchSend) error, grow func(context.Context, *volumepb.GrowVolumeRequest, growSend) error) net.Listener {
	t.Helper()
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	server.RegisterService(volumepb.VolumeServiceName, &ttrpc.ServiceDesc{Streams: map[string]ttrpc.Stream{
		"WatchVolumes": service.Stream(func(ctx context.Context, _ *volumepb.WatchVolumesRequest, send watchSend) error {
			return watch(ctx, send)
		}),
		"GrowVolume": service.Stream(grow),
	}})
	listener := listen(t)
	go server.Serve(context.Background(), listener)
	t.Cleanup(func() { server.Close() })
	return listener
}

func added(path string) *volumepb.VolumeEvent {
	return &volumepb.VolumeEvent{Type: volumepb.VolumeEvent_ADDED, Volume: &volumepb.Volume{VolumeGuestPath: path}}
}

func TestWatchYieldsEachEventAndTheErrorThatEndsIt(t *testing.T) {
	for name, test := range map[string]struct {
		end  error
		want codes.Code
	}{
		"the agent ends":              {status.Error(codes.Unavailable, "the agent is ending: call again"), codes.Unavailable},
		"another error":               {status.Error(codes.Internal, "mountinfo"), codes.Internal},
		"an end without an error":     {nil, codes.Unavailable},
		"a method that it has not":    {status.Error(codes.Unimplemented, "WatchVolumes"), codes.Unimplemented},
		"a server that does not wait": {status.Error(codes.DeadlineExceeded, "listing"), codes.DeadlineExceeded},
	} {
		agent := serveStreams(t, func(_ context.Context, send watchSend) error {
			for _, event := range []*volumepb.VolumeEvent{added("/a"), {Type: volumepb.VolumeEvent_RESYNCED}, {Type: volumepb.VolumeEvent_REMOVED, Volume: &volumepb.Volume{VolumeGuestPath: "/a"}}} {
				if err := send(event); err != nil {
					return err
				}
			}
			return test.end
		}, nil)
		var got []string
		var last error
		for event, err := range dial(t, agent, Config{}).WatchVolumes(t.Context()) {
			if last = err; err == nil {
				got = append(got, event.Type.String())
			}
		}
		if strings.Join(got, " ") != "ADDED RESYNCED REMOVED" || status.Code(last) != test.want || !strings.Contains(last.Error(), "WatchVolumes") {
			t.Errorf("%s\nwant three events and %v\ngot  %v and %v", name, test.want, got, last)
		}
	}
}

// The agent learns of the end of a watch only by the end of its connection.
func TestWatchEndsItsConnectionAndNoOther(t *testing.T) {
	for name, leave := range map[string]func(*Client, context.CancelFunc) (leaves bool){
		"the loop":      func(*Client, context.CancelFunc) bool { return true },
		"its context":   func(_ *Client, cancel context.CancelFunc) bool { cancel(); return false },
		"with a client": func(c *Client, _ context.CancelFunc) bool { c.Close(); return false },
	} {
		ended := make(chan struct{})
		agent := serveStreams(t, func(ctx context.Context, send watchSend) error {
			defer close(ended)
			if err := send(added("/a")); err != nil {
				return err
			}
			<-ctx.Done()
			return ctx.Err()
		}, nil)
		c := dial(t, agent, Config{Timeout: time.Hour})
		ctx, cancel := context.WithCancel(t.Context())
		var last error
		for _, err := range c.WatchVolumes(ctx) {
			if last = err; err == nil && leave(c, cancel) {
				break
			}
		}
		<-ended
		want := map[string]codes.Code{"the loop": codes.OK, "its context": codes.Canceled, "with a client": codes.Unavailable}[name]
		if status.Code(last) != want {
			t.Errorf("%s\nwant %v\ngot  %v", name, want, last)
		}
		if got := c.link.ended.Load(); got != (name == "with a client") {
			t.Errorf("%s\nthe connection of the calls has ended: %v", name, got)
		}
		cancel()
	}
}

func TestWatchWhoseConnectionBreaksSaysSo(t *testing.T) {
	agent := serveStreams(t, func(ctx context.Context, send watchSend) error {
		if err := send(added("/a")); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}, nil)
	b, front := between(t, agent)
	var last error
	for _, err := range dial(t, front, Config{}).WatchVolumes(t.Context()) {
		if last = err; err == nil {
			b.breakAll()
		}
	}
	if status.Code(last) != codes.Unavailable {
		t.Errorf("want %v\ngot  %v", codes.Unavailable, last)
	}
}

func TestStreamsNameALostVsock(t *testing.T) {
	vsock := fakeVsock{make(chan struct{})}
	c := dial(t, serveStreams(t, nil, nil), Config{Timeout: time.Hour, Vsock: vsock})
	close(vsock.done)
	<-c.life.Done()
	for _, err := range c.WatchVolumes(t.Context()) {
		if status.Code(err) != codes.Unavailable || !errors.Is(err, errBackendDied) {
			t.Errorf("want %v and %v\ngot  %v", codes.Unavailable, errBackendDied, err)
		}
	}
}

// A stream's context ends a moment after its client's life. No request is sent in that moment.
func TestClosedClientSendsNoRequestForAStream(t *testing.T) {
	var begun atomic.Int64
	agent := serveStreams(t, func(context.Context, watchSend) error { begun.Add(1); return nil }, nil)
	c := dial(t, agent, Config{})
	c.Close()
	for range 200 {
		for _, err := range c.WatchVolumes(t.Context()) {
			if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), errClosed.Error()) {
				t.Errorf("want %v, %v\ngot  %v", codes.Unavailable, errClosed, err)
			}
		}
	}
	if got := begun.Load(); got != 0 {
		t.Errorf("requests of a closed client\nwant 0\ngot  %d", got)
	}
}

func TestGrowVolumeShowsEachStep(t *testing.T) {
	var request *volumepb.GrowVolumeRequest
	for name, test := range map[string]struct {
		done bool
		end  error
		want codes.Code
	}{
		"done":                   {true, nil, codes.OK},
		"refused":                {false, status.Error(codes.OutOfRange, "smaller"), codes.OutOfRange},
		"ended before it was":    {false, nil, codes.Unavailable},
		"the agent ends earlier": {false, status.Error(codes.Unavailable, "call again"), codes.Unavailable},
	} {
		agent := serveStreams(t, nil, func(_ context.Context, r *volumepb.GrowVolumeRequest, send growSend) error {
			request = r
			for now := uint64(1); now <= 3; now++ {
				if err := send(&volumepb.GrowVolumeProgress{From: 1, Now: now, Goal: 3, Done: test.done && now == 3}); err != nil {
					return err
				}
			}
			return test.end
		})
		var steps []uint64
		err := dial(t, agent, Config{}).GrowVolume(t.Context(), "/v", 3, func(p *volumepb.GrowVolumeProgress) { steps = append(steps, p.Now) })
		if fmt.Sprint(steps) != "[1 2 3]" || status.Code(err) != test.want {
			t.Errorf("%s\nwant three steps and %v\ngot  %v and %v", name, test.want, steps, err)
		}
		if request.VolumeGuestPath != "/v" || request.Size_ != 3 {
			t.Errorf("%s\nwant a request for /v, 3 bytes\ngot  %v", name, request)
		}
	}
}

func TestInvalidEventsEndAWatch(t *testing.T) {
	long := strings.Repeat("x", maxText)
	for name, lie := range map[string]*volumepb.VolumeEvent{
		"no type":           {Volume: &volumepb.Volume{VolumeGuestPath: "/a"}},
		"a later type":      {Type: volumepb.VolumeEvent_RESYNCED + 1},
		"no volume":         {Type: volumepb.VolumeEvent_ADDED},
		"no path":           {Type: volumepb.VolumeEvent_REMOVED, Volume: &volumepb.Volume{}},
		"a relative path":   added("a"),
		"a long path":       added("/" + long),
		"a long filesystem": {Type: volumepb.VolumeEvent_ADDED, Volume: &volumepb.Volume{VolumeGuestPath: "/a", Filesystem: long + "x"}},
		"a negative size":   {Type: volumepb.VolumeEvent_ADDED, Volume: &volumepb.Volume{VolumeGuestPath: "/a", DeviceBytes: 1 << 63}},
		"a huge goal":       {Type: volumepb.VolumeEvent_ADDED, Volume: &volumepb.Volume{VolumeGuestPath: "/a", Growth: &volumepb.GrowVolumeProgress{Goal: 1 << 63}}},
		"a bad condition":   {Type: volumepb.VolumeEvent_ADDED, Volume: &volumepb.Volume{VolumeGuestPath: "/a", Conditions: []*volumepb.Condition{{}}}},
	} {
		agent := serveStreams(t, func(_ context.Context, send watchSend) error { return send(lie) }, nil)
		for event, err := range dial(t, agent, Config{}).WatchVolumes(t.Context()) {
			if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "is invalid") {
				t.Errorf("%s\nwant an error that calls it invalid\ngot  %v, %v", name, event, err)
			}
		}
	}
}

// A guest may add volumes without end, and a watcher remembers all of them. The watch ends when
// they would fit into no list; volumes that are removed, and those that a RESYNC has replaced, do
// not count.
func TestVolumesOfAWatchAreBounded(t *testing.T) {
	const enough = 6 * maxVolumes
	large := strings.Repeat("x", maxText)
	for name, test := range map[string]struct {
		event func(i int) *volumepb.VolumeEvent
		most  int // events; 0 if all are taken
	}{
		"many volumes": {func(i int) *volumepb.VolumeEvent { return added(fmt.Sprint("/", i)) }, 2 * maxVolumes},
		"large volumes": {func(i int) *volumepb.VolumeEvent {
			e := added(fmt.Sprint("/", i))
			e.Volume.Devices = slices.Repeat([]string{large}, maxNames)
			return e
		}, 2 * maxAnswer / (maxText * maxNames)},
		"a RESYNC again and again": {func(i int) *volumepb.VolumeEvent {
			if i%2 == 1 {
				return &volumepb.VolumeEvent{Type: volumepb.VolumeEvent_RESYNC}
			}
			return added(fmt.Sprint("/", i))
		}, 4 * maxVolumes},
		"one volume": {func(int) *volumepb.VolumeEvent {
			return &volumepb.VolumeEvent{Type: volumepb.VolumeEvent_CHANGED, Volume: &volumepb.Volume{VolumeGuestPath: "/v", Filesystem: large}}
		}, 0},
		"volumes that come and go": {func(i int) *volumepb.VolumeEvent {
			e := added(fmt.Sprint("/", i/2))
			if e.Volume.Filesystem = large; i%2 == 1 {
				e.Type = volumepb.VolumeEvent_REMOVED
			}
			return e
		}, 0},
		"others after each RESYNC": {func(i int) *volumepb.VolumeEvent {
			switch i % maxVolumes {
			case 0:
				return &volumepb.VolumeEvent{Type: volumepb.VolumeEvent_RESYNC}
			case maxVolumes - 1:
				return &volumepb.VolumeEvent{Type: volumepb.VolumeEvent_RESYNCED}
			}
			return added(fmt.Sprint("/", i))
		}, 0},
	} {
		all, taken := known{volumes: map[string]knownVolume{}}, 0
		upTo := cmp.Or(2*test.most, enough)
		for taken < upTo && all.check(test.event(taken)) == nil {
			taken++
		}
		if want := cmp.Or(test.most, enough); taken > want || taken < want*9/10 {
			t.Errorf("%s: events that are taken\nwant %d, or a few less\ngot  %d", name, want, taken)
		}
	}
	agent := serveStreams(t, func(_ context.Context, send watchSend) error {
		for i := 0; ; i++ {
			if err := send(added(fmt.Sprint("/", i))); err != nil {
				return err
			}
		}
	}, nil)
	events := 0
	for _, err := range dial(t, agent, Config{}).WatchVolumes(t.Context()) {
		if events++; err == nil && events <= 2*maxVolumes {
			continue
		}
		if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "is invalid") {
			t.Errorf("after %d volumes\nwant an error that calls it invalid\ngot  %v", events, err)
		}
		break
	}
}

// Frames of data are for streams: on the connection of the calls they end it.
func TestDataIsForStreamsAlone(t *testing.T) {
	const data = "\x00\x00\x00\x00\x00\x00\x00\x01\x03\x00"
	err := dial(t, hostile(t, data), Config{Timeout: time.Hour}).Check(t.Context())
	if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "is invalid") {
		t.Errorf("a call\nwant %v\ngot  %v", codes.Internal, err)
	}
	for name, flood := range map[string]string{
		"another stream":    strings.Repeat("\x00\x00\x00\x00\x00\x00\x00\x03\x03\x00", 1<<10),
		"after the last":    "\x00\x00\x00\x00\x00\x00\x00\x01\x03\x05" + data,
		"requests":          strings.Repeat("\x00\x00\x00\x00\x00\x00\x00\x01\x01\x00", 1<<10),
		"a frame too long":  "\x00\x10\x00\x01\x00\x00\x00\x01\x03\x00",
		"events of no type": strings.Repeat(data, 1<<10),
	} {
		log := countLog(t)
		var last error
		for _, err := range dial(t, hostile(t, flood), Config{Timeout: time.Hour}).WatchVolumes(t.Context()) {
			last = err
		}
		if code := status.Code(last); code != codes.Internal && (name != "after the last" || code != codes.Unavailable) {
			t.Errorf("%s\nwant %v\ngot  %v", name, codes.Internal, last)
		}
		if got := log.lines.Load(); got > 1 {
			t.Errorf("%s\nwant at most a line in the log\ngot  %d", name, got)
		}
	}
}

// A caller that stops taking events makes the agent wait, and gets all of them later. ttrpc's own
// client would drop the 65th after a second, with a line in the log for each further one.
func TestStreamThatIsNotReadLosesNothing(t *testing.T) {
	log := countLog(t)
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		var sent atomic.Int64
		go func() {
			io.ReadFull(theirs, make([]byte, ttrpcframe.HeaderBytes)) // of the request
			go io.Copy(io.Discard, theirs)
			event, _ := added("/a").Marshal()
			frame := append(ttrpcframe.Header{Length: uint32(len(event)), StreamID: 1, Type: ttrpcframe.TypeData}.Append(nil), event...)
			for range 10 * maxUnread {
				if _, err := theirs.Write(frame); err != nil {
					return
				}
				sent.Add(1)
			}
			theirs.Close()
		}()
		guarded := newStreamConn(ours, time.Hour)
		client := ttrpc.NewClient(guarded)
		defer client.Close()
		taken := 0
		for _, err := range service.Receive[volumepb.VolumeEvent](t.Context(), client, volumepb.VolumeServiceName, "WatchVolumes", &volumepb.WatchVolumesRequest{}) {
			if err != nil {
				break
			}
			if taken++; taken == 1 {
				time.Sleep(time.Hour)
				synctest.Wait()
				if got := sent.Load(); got != maxUnread {
					t.Errorf("events that the agent could send\nwant %d\ngot  %d", maxUnread, got)
				}
			}
			guarded.took()
		}
		if taken != 10*maxUnread {
			t.Errorf("events\nwant %d\ngot  %d", 10*maxUnread, taken)
		}
	})
	if got := log.lines.Load(); got != 0 {
		t.Errorf("lines in the log\nwant 0\ngot  %d", got)
	}
}

// Close ends a Read that waits for its caller.
func TestCloseEndsAStreamThatIsNotRead(t *testing.T) {
	g := newStreamConn(&scripted{Reader: bytes.NewReader(bytes.Repeat([]byte("\x00\x00\x00\x00\x00\x00\x00\x01\x03\x00"), maxUnread+1)), piece: 9}, 0)
	g.owe(ttrpcframe.Header{StreamID: 1})
	for range maxUnread {
		if n, err := g.Read(make([]byte, 100)); n != ttrpcframe.HeaderBytes || err != nil {
			t.Fatalf("want one header\ngot  %d bytes, %v", n, err)
		}
	}
	ended := make(chan error)
	go func() {
		_, err := g.Read(make([]byte, 100))
		ended <- err
	}()
	g.Close()
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Errorf("want %v\ngot  %v", net.ErrClosed, err)
	}
}

// TestListOfAllVolumesFits: a guest with as many disks as a machine has, all with conditions, is
// listed.
func TestListOfAllVolumesFits(t *testing.T) {
	list := &volumepb.ListVolumesResponse{}
	for i := range 256 {
		v := &volumepb.Volume{
			VolumeGuestPath: fmt.Sprintf("/run/kata-containers/sandbox/storage/%0100d", i), Filesystem: "ext4", Devices: []string{"/dev/vdaa"},
			DeviceBytes: 1 << 40, FilesystemBytes: 1 << 40, Growth: &volumepb.GrowVolumeProgress{From: 1, Now: 2, Goal: 3},
		}
		for range 4 {
			v.Conditions = append(v.Conditions, &volumepb.Condition{Status: volumepb.Condition_INACCESSIBLE, Reason: "IOError", Message: strings.Repeat("m", 300), SinceUnixMilliseconds: 1 << 40})
		}
		list.Volumes = append(list.Volumes, v)
	}
	volumes, err := connect(t, &agent{answers: map[string]any{"ListVolumes": list}}).ListVolumes(t.Context())
	if err != nil || len(volumes) != 256 {
		t.Errorf("want 256 volumes\ngot  %d, %v", len(volumes), err)
	}
}
