package remote

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

func received(stream string) (Reply, error) {
	var reply Reply
	return reply, NewLines(bytes.NewBufferString(stream)).Receive(&reply)
}

func TestLinesAreBoundedAndWhole(t *testing.T) {
	long := strings.Repeat(" ", MaxLine)
	for name, test := range map[string]struct {
		stream string
		want   error
	}{
		"nothing":        {"", io.EOF},
		"cut off":        {`{"done":true}`, io.ErrUnexpectedEOF},
		"longest":        {"{}" + long[2:] + "\n", nil},
		"one too long":   {"{}" + long[1:] + "\n", ErrLineTooLong},
		"without an end": {long + long, ErrLineTooLong},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := received(test.stream); !errors.Is(err, test.want) {
				t.Errorf("receiving\nwant: %v\n got: %v", test.want, err)
			}
		})
	}
}

func TestSendRefusesWhatReceiveWould(t *testing.T) {
	var sent bytes.Buffer
	if err := NewLines(&sent).Send(strings.Repeat("x", MaxLine)); !errors.Is(err, ErrLineTooLong) {
		t.Errorf("sending\nwant: %v\n got: %v", ErrLineTooLong, err)
	}
	if sent.Len() != 0 {
		t.Errorf("sent %d bytes of a line that was refused", sent.Len())
	}
}

func FuzzReply(f *testing.F) {
	for _, seed := range []string{"", "\n", "{}\n", `{"result":{"index":1,"bytes":512,"sum":18446744073709551615}}` + "\n",
		`{"error":{"message":"x","errno":5,"index":3},"done":true}` + "\n", `{"error":{"errno":-1}}` + "\n", `{"done":1}` + "\n", "[[[[[["} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, stream string) {
		reply, err := received(stream)
		if err == nil && !strings.Contains(stream, "\n") {
			t.Errorf("a reply without the end of its line was taken: %q", stream)
		}
		if reply.Error != nil {
			_ = reply.Error.Error()
		}
	})
}
