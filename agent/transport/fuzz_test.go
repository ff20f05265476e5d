package transport

import (
	"bytes"
	"encoding/binary"
	"io"
	"slices"
	"testing"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// FuzzFrames sends any bytes to a connection, in two pieces, and checks that quick answers what it
// accepts, that invalid frames are refused, and that all other frames go to the server unchanged,
// except for their numbers.
func FuzzFrames(f *testing.F) {
	request := func(stream uint32, r *ttrpc.Request) []byte {
		b, err := proto.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		return append(ttrpcframe.Header{Length: uint32(len(b)), StreamID: stream, Type: ttrpcframe.TypeRequest}.Append(nil), b...)
	}
	quick := request(1, &ttrpc.Request{Service: "s", Method: "Check", Payload: []byte("p")})
	slow := request(3, &ttrpc.Request{Service: "s", Method: "Version"})
	f.Add(bytes.Join([][]byte{quick, slow, quick}, nil), 3)
	f.Add(bytes.Join([][]byte{slow, request(1, &ttrpc.Request{Method: "Version"}), slow, quick}, nil), 3)
	f.Add(append(quick, quick[:12]...), 10)
	f.Add(request(1, &ttrpc.Request{Method: "Check", TimeoutNano: 1}), 0)
	f.Add(request(1, &ttrpc.Request{Method: "Check", TimeoutNano: -1, Metadata: []*ttrpc.KeyValue{{Key: "k"}}}), 0)
	f.Add(request(2, &ttrpc.Request{Method: "Check"}), 0)
	f.Add(request(1, &ttrpc.Request{Method: "Check", Payload: make([]byte, quickBytes)}), 1000)
	f.Add(ttrpcframe.Header{Length: 1<<32 - 1, StreamID: 1, Type: ttrpcframe.TypeRequest}.Append(nil), 0)
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0}, 1)
	f.Add(ttrpcframe.Header{StreamID: 1, Type: ttrpcframe.TypeData}.Append(slices.Clip(slow)), 30)
	f.Add(ttrpcframe.Header{StreamID: 3, Type: ttrpcframe.TypeResponse}.Append(slices.Clip(slow)), 30)
	f.Fuzz(func(t *testing.T, sent []byte, cut int) {
		if len(sent) > 8<<10 {
			return // longer inputs are slower and find nothing more
		}
		wantUp, wantAnswers := sort(sent)
		up, answers := exchange(t, sent, max(0, min(cut, len(sent))))
		if !bytes.Equal(up, wantUp) {
			t.Errorf("of %x\nwant up %x\ngot     %x", sent, wantUp, up)
		}
		if !bytes.Equal(answers, wantAnswers) {
			t.Errorf("of %x\nwant answers %x\ngot          %x", sent, wantAnswers, answers)
		}
	})
}

// parrot answers Check with the call's own payload.
func parrot(r *ttrpcframe.Request) ([]byte, bool) {
	return r.Payload, string(r.Method) == "Check"
}

// sort computes independently which bytes go to the server, and which answers are sent.
func sort(sent []byte) (up, answers []byte) {
	inServer := map[uint32]bool{}
	for len(sent) >= ttrpcframe.HeaderBytes {
		h := ttrpcframe.ParseHeader(sent)
		n := int(min(uint64(ttrpcframe.HeaderBytes)+uint64(h.Length), uint64(len(sent))))
		whole := n == ttrpcframe.HeaderBytes+int(h.Length)
		request, err := ttrpcframe.ParseRequest(sent[ttrpcframe.HeaderBytes:n])
		patient := request.TimeoutNano == 0 || request.TimeoutNano >= int64(leastTimeout)
		response, ok := parrot(&request)
		if text, is := noCall(h, inServer[h.StreamID]); is {
			if whole && text != "" {
				answers = ttrpcframe.AppendError(answers, h.StreamID, codes.InvalidArgument, text)
			}
			sent = sent[n:]
			continue
		}
		if whole && n <= quickBytes && err == nil && !request.HasMetadata && patient && ok {
			answers = ttrpcframe.AppendResponse(answers, h.StreamID, response)
		} else if whole || h.Length > ttrpcframe.MaxLength { // the server skips such a frame
			numbered := bytes.Clone(sent[:n])
			binary.BigEndian.PutUint32(numbered[4:], uint32(2*len(inServer)+1))
			up = append(up, numbered...)
			inServer[h.StreamID] = true // for ever: the server does not answer
		}
		sent = sent[n:]
	}
	return up, answers
}

// noCall returns the error text for a frame that is not a valid call.
func noCall(h ttrpcframe.Header, inServer bool) (text string, is bool) {
	switch {
	case h.StreamID%2 != 1:
		return "StreamID must be odd for client initiated streams", true
	case h.Type == ttrpcframe.TypeRequest && !inServer:
		return "", false
	case h.Type == ttrpcframe.TypeRequest:
		return "StreamID cannot be re-used while its call is in progress", true
	case h.Type == ttrpcframe.TypeData:
		return "StreamID is no longer active", true
	}
	return "", true
}

// exchange sends bytes over a connection and returns what the server and the peer receive.
func exchange(t *testing.T, sent []byte, cut int) (up, answers []byte) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[1])
	closed := make(chan struct{})
	c, err := newConn(pair[0], addr{"unix", "here"}, addr{"unix", "there"}, parrot, newRoom(boundsOf(1<<30)), func() { close(closed) })
	if err != nil {
		t.Fatal(err)
	}
	c.watched.Store(true) // disables the watch: no call hangs, however slow the machine is, so all keep their order
	read, answered := make(chan []byte), make(chan []byte)
	go func() {
		b, _ := io.ReadAll(c) // ends with what was sent: there is no other error
		read <- b
	}()
	go func() { answered <- readAll(pair[1]) }() // concurrently, because otherwise the writes would block
	for _, piece := range [][]byte{sent[:cut], sent[cut:]} {
		for len(piece) > 0 {
			n, err := unix.Write(pair[1], piece)
			if err != nil {
				t.Fatal(err)
			}
			piece = piece[n:]
		}
	}
	if err := unix.Shutdown(pair[1], unix.SHUT_WR); err != nil {
		t.Fatal(err)
	}
	up = <-read
	c.Close()
	<-closed
	return up, <-answered
}

// readAll reads until the end or an error.
func readAll(fd int) (all []byte) {
	var buf [4 << 10]byte
	for {
		n, err := unix.Read(fd, buf[:])
		if n <= 0 || err != nil {
			return all
		}
		all = append(all, buf[:n]...)
	}
}
