package transport

import (
	"bytes"
	"io"
	"testing"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/agent/arrival"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// socketPair returns one end for a connection, and one for its peer.
func socketPair(t *testing.T) (end, peer int) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return pair[0], pair[1]
}

// ordered makes a connection whose calls have an order.
func ordered(t *testing.T, end int, order *arrival.Order) *lane {
	t.Helper()
	r := newRoom(boundsOf(1 << 30))
	r.order = order
	decline := func(*ttrpcframe.Request) ([]byte, bool) { return nil, false }
	c, err := newConn(end, addr{"unix", "here"}, addr{"unix", "there"}, decline, r, func() {})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// someOrder returns an order for two methods.
func someOrder() *arrival.Order {
	return &arrival.Order{Of: func(r *ttrpcframe.Request) bool {
		return string(r.Method) == "CreateContainer" || string(r.Method) == "RemoveContainer"
	}}
}

func requestFrame(t *testing.T, method string, bytes int) []byte {
	t.Helper()
	b, err := proto.Marshal(&ttrpc.Request{Service: agentpb.AgentServiceName, Method: method, Payload: make([]byte, bytes)})
	if err != nil {
		t.Fatal(err)
	}
	return append(ttrpcframe.Header{Length: uint32(len(b)), StreamID: 1, Type: ttrpcframe.TypeRequest}.Append(nil), b...)
}

// A caller that has hung up may have made its next call on another connection.
func TestCallOfAPeerThatHungUpDoesNotReachTheServer(t *testing.T) {
	for _, test := range []struct {
		method string
		goesUp bool
	}{{"RemoveContainer", false}, {"ResizeVolume", true}} {
		for _, size := range []int{10, 20 << 10} {
			end, peer := socketPair(t)
			if _, err := unix.Write(peer, requestFrame(t, test.method, size)); err != nil {
				t.Fatal(err)
			}
			unix.Close(peer)
			c := ordered(t, end, someOrder())
			up, err := io.ReadAll(c)
			if err != nil || len(up) > 0 != test.goesUp {
				t.Errorf("%s of %d bytes went up\nwant %v\ngot  %v, %v", test.method, size, test.goesUp, len(up) > 0, err)
			}
			c.Close()
		}
	}
}

// The server gets the ticket, which is given back with the answer or at the connection's end.
func TestTicketsEndWithTheirAnswers(t *testing.T) {
	order := someOrder()
	for _, size := range []int{10, 100 << 10} {
		for _, answers := range []bool{true, false} {
			end, peer := socketPair(t)
			c := ordered(t, end, order)
			sent := requestFrame(t, "CreateContainer", size)
			go func() { _, _ = unix.Write(peer, sent) }()
			head := make([]byte, ttrpcframe.HeaderBytes)
			if _, err := io.ReadFull(c, head); err != nil {
				t.Fatal(err)
			}
			body := make([]byte, ttrpcframe.ParseHeader(head).Length)
			if _, err := io.ReadFull(c, body); err != nil {
				t.Fatal(err)
			}
			var r ttrpc.Request
			if err := proto.Unmarshal(body, &r); err != nil || len(r.Metadata) != 1 || r.Metadata[0].Key != arrival.Key || !bytes.Equal(r.Payload, make([]byte, size)) {
				t.Errorf("%d bytes\nwant one ticket\ngot  %v, error %v", size, r.Metadata, err)
			}
			if answers {
				if _, err := c.Write(ttrpcframe.AppendResponse(nil, 1, nil)); err != nil {
					t.Fatal(err)
				}
			} else {
				unix.Close(peer)
				_, _ = io.ReadAll(c) // until the end
				c.Close()
			}
			c.tickets.mu.Lock()
			left := len(c.tickets.byStream)
			c.tickets.mu.Unlock()
			if answers && left > 0 {
				t.Errorf("%d tickets are left", left)
			}
			if answers {
				unix.Close(peer)
				c.Close()
			}
		}
	}
}
