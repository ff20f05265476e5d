package transport

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// versionCall is a call of Version that ttrpc's server answers with the stream's id.
func versionCall(t *testing.T, stream uint32) []byte {
	t.Helper()
	payload, err := (&agentpb.CheckRequest{Service: fmt.Sprint(stream)}).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	b, err := proto.Marshal(&ttrpc.Request{Service: agentpb.HealthServiceName, Method: "Version", Payload: payload})
	if err != nil {
		t.Fatal(err)
	}
	return append(ttrpcframe.Header{Length: uint32(len(b)), StreamID: stream, Type: ttrpcframe.TypeRequest}.Append(nil), b...)
}

// received returns the stream and the response of the next answer.
func received(t *testing.T, from io.Reader) (uint32, *ttrpc.Response) {
	t.Helper()
	head := make([]byte, ttrpcframe.HeaderBytes)
	if _, err := io.ReadFull(from, head); err != nil {
		t.Fatal(err)
	}
	header := ttrpcframe.ParseHeader(head)
	body := make([]byte, header.Length)
	if _, err := io.ReadFull(from, body); err != nil {
		t.Fatal(err)
	}
	var r ttrpc.Response
	if err := proto.Unmarshal(body, &r); err != nil {
		t.Fatal(err)
	}
	return header.StreamID, &r
}

// The client of Kata's runtime-rs sends the ids of concurrent calls in any order. kata-agent
// answers them all.
func TestStreamsMayComeInAnyOrderAndAgain(t *testing.T) {
	conn, err := net.Dial("unix", serve(t, serving))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, ids := range [][]uint32{{9, 3, 1<<32 - 1, 7, 1}, {7, 9}, {1, 3}} { // the later ones are used again
		var all []byte
		due := map[uint32]bool{}
		for _, id := range ids {
			all, due[id] = append(all, versionCall(t, id)...), true
		}
		if _, err := conn.Write(all); err != nil {
			t.Fatal(err)
		}
		for len(due) > 0 {
			id, r := received(t, conn)
			var version agentpb.VersionCheckResponse
			if err := version.Unmarshal(r.Payload); err != nil || r.Status.GetCode() != 0 || version.AgentVersion != fmt.Sprint(id) || !due[id] {
				t.Fatalf("streams %d\nwant each answer once, on its stream\ngot  on %d: %v, %q, error %v", ids, id, r.Status, version.AgentVersion, err)
			}
			delete(due, id)
		}
	}
}

// The peer could not tell the answers of two calls with one id apart.
func TestStreamOfACallInProgressIsRefused(t *testing.T) {
	end, peer := socketPair(t)
	defer unix.Close(peer)
	c := ordered(t, end, nil)
	defer c.Close()
	three := ttrpcframe.Header{StreamID: 3, Type: ttrpcframe.TypeRequest}.Append(nil)
	one := ttrpcframe.Header{StreamID: 1, Type: ttrpcframe.TypeRequest}.Append(nil)
	if _, err := unix.Write(peer, append(append(three, three...), one...)); err != nil {
		t.Fatal(err)
	}
	want := ttrpcframe.AppendError(nil, 3, codes.InvalidArgument, "StreamID cannot be re-used while its call is in progress")
	got := make([]byte, len(want))
	up := make([]byte, 2*ttrpcframe.HeaderBytes)
	if _, err := io.ReadFull(c, up); err != nil {
		t.Fatal(err)
	}
	if n, err := unix.Read(peer, got); err != nil || string(got[:n]) != string(want) {
		t.Errorf("want %q\ngot  %q, error %v", want, got[:n], err)
	}
	if _, err := c.Write(ttrpcframe.AppendResponse(nil, 1, nil)); err != nil { // the server's number of the first call
		t.Fatal(err)
	}
	want = ttrpcframe.AppendResponse(nil, 3, nil)
	if n, err := unix.Read(peer, got); err != nil || string(got[:n]) != string(want) {
		t.Errorf("the answer\nwant %q\ngot  %q, error %v", want, got[:n], err)
	}
	if _, err := unix.Write(peer, three); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, up[:ttrpcframe.HeaderBytes]); err != nil || ttrpcframe.ParseHeader(up).StreamID != 5 {
		t.Errorf("the id after its answer\nwant another call, the third\ngot  %+v, error %v", ttrpcframe.ParseHeader(up), err)
	}
}

func TestEndOfAllStreamIDsIsLogged(t *testing.T) {
	var said []string
	r := small()
	r.warn = func(format string, args ...any) { said = append(said, fmt.Sprintf(format, args...)) }
	c := &conn{room: r, remote: addr{"vsock", "vsock://2:4711"}, numbering: numbering{begun: 1 << 31}}
	if err := c.take(&ttrpcframe.Header{StreamID: 1}); !errors.Is(err, errNumbers) {
		t.Errorf("\nwant %v\ngot  %v", errNumbers, err)
	}
	if want := []string{"the connection from vsock://2:4711 ends: " + errNumbers.Error()}; !slices.Equal(said, want) {
		t.Errorf("\nwant %q\ngot  %q", want, said)
	}
}

func TestConnectionEndsWhenItsStreamIDsAreUsedUp(t *testing.T) {
	n := numbering{begun: 1<<31 - 1}
	last, err := n.begin(1)
	if err != nil || last != 1<<32-1 {
		t.Errorf("the last number\nwant %d\ngot  %d, error %v", uint32(1<<32-1), last, err)
	}
	if number, err := n.begin(3); err == nil {
		t.Errorf("want no further number\ngot  %d", number)
	}
}
