package ttrpcframe

import (
	"bytes"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"
)

func whole(t testing.TB, r *ttrpc.Request) []byte {
	b, err := proto.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestRequestIsReadAsTtrpcWritesIt(t *testing.T) {
	b := whole(t, &ttrpc.Request{Service: "grpc.Health", Method: "Check", Payload: []byte{1, 2}, TimeoutNano: 5e9})
	r, err := ParseRequest(b)
	if err != nil || string(r.Service) != "grpc.Health" || string(r.Method) != "Check" || !bytes.Equal(r.Payload, []byte{1, 2}) || r.TimeoutNano != 5e9 || r.HasMetadata {
		t.Errorf("got %+v, %v", r, err)
	}
	b = whole(t, &ttrpc.Request{Metadata: []*ttrpc.KeyValue{{Key: "k", Value: "v"}}})
	if r, err = ParseRequest(b); err != nil || !r.HasMetadata {
		t.Errorf("got %+v, %v", r, err)
	}
}

func TestResponseIsReadByTtrpc(t *testing.T) {
	for _, payload := range [][]byte{nil, {7}, bytes.Repeat([]byte{8}, 300)} {
		b := AppendResponse(nil, 9, payload)
		h := ParseHeader(b)
		if want := (Header{uint32(len(b) - HeaderBytes), 9, TypeResponse, 0}); h != want {
			t.Errorf("header\nwant %+v\ngot  %+v", want, h)
		}
		var r ttrpc.Response
		if err := proto.Unmarshal(b[HeaderBytes:], &r); err != nil || !bytes.Equal(r.Payload, payload) || r.Status != nil {
			t.Errorf("got %v, %v", &r, err)
		}
	}
}

// FuzzRequest compares ParseRequest with ttrpc's own decoding.
func FuzzRequest(f *testing.F) {
	f.Add(whole(f, &ttrpc.Request{Service: "grpc.AgentService", Method: "GetVolumeStats", Payload: []byte("\x0a\x04/run"), TimeoutNano: 1}))
	f.Add([]byte{0x0a, 0xff})
	f.Add([]byte{0x08, 0x01})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseRequest(b)
		if err != nil {
			return
		}
		var want ttrpc.Request
		if err := proto.Unmarshal(b, &want); err != nil {
			return // text that is not UTF-8, or malformed metadata
		}
		if string(r.Service) != want.Service || string(r.Method) != want.Method || !bytes.Equal(r.Payload, want.Payload) || r.TimeoutNano != want.TimeoutNano || r.HasMetadata != (len(want.Metadata) > 0) {
			t.Errorf("%x\nwant %v\ngot  %+v", b, &want, r)
		}
	})
}

func FuzzHeader(f *testing.F) {
	f.Add([]byte{0, 0, 0, 5, 0, 0, 0, 1, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < HeaderBytes {
			return
		}
		if got := ParseHeader(b).Append(nil); !bytes.Equal(got, b[:HeaderBytes]) {
			t.Errorf("%x is written as %x", b[:HeaderBytes], got)
		}
	})
}

func TestMetadataIsAddedBeforeTheRequestsOwn(t *testing.T) {
	request := &ttrpc.Request{Service: "s", Method: "m", Payload: bytes.Repeat([]byte{1}, 300), Metadata: []*ttrpc.KeyValue{{Key: "k", Value: "old"}}}
	body := whole(t, request)
	b := WithMetadata(append(Header{uint32(len(body)), 7, TypeRequest, 3}.Append(nil), body...), "k", "new")
	if h, want := ParseHeader(b), (Header{uint32(len(b) - HeaderBytes), 7, TypeRequest, 3}); h != want {
		t.Errorf("header\nwant %+v\ngot  %+v", want, h)
	}
	var got ttrpc.Request
	if err := proto.Unmarshal(b[HeaderBytes:], &got); err != nil {
		t.Fatal(err)
	}
	request.Metadata = append([]*ttrpc.KeyValue{{Key: "k", Value: "new"}}, request.Metadata...)
	if !proto.Equal(&got, request) {
		t.Errorf("want %v\ngot  %v", request, &got)
	}
}

func TestTimeoutReplacesTheEarlierOne(t *testing.T) {
	for _, before := range []int64{0, 1, 1 << 40} {
		request := &ttrpc.Request{Service: "s", Method: "m", Payload: bytes.Repeat([]byte{1}, 300), TimeoutNano: before}
		body := whole(t, request)
		b := WithTimeout(append(Header{uint32(len(body)), 7, TypeRequest, 3}.Append(nil), body...), 12345)
		if h, want := ParseHeader(b), (Header{uint32(len(b) - HeaderBytes), 7, TypeRequest, 3}); h != want {
			t.Errorf("header\nwant %+v\ngot  %+v", want, h)
		}
		var got ttrpc.Request
		if err := proto.Unmarshal(b[HeaderBytes:], &got); err != nil {
			t.Fatal(err)
		}
		request.TimeoutNano = 12345
		ours, err := ParseRequest(b[HeaderBytes:])
		if err != nil || !proto.Equal(&got, request) || ours.TimeoutNano != 12345 {
			t.Errorf("want %v\ngot  %v, and %+v, error %v", request, &got, ours, err)
		}
	}
}
