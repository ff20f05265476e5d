package qmp

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"slices"
	"testing"
)

// FuzzStream splits bytes from a socket into lines; they arrive in pieces of any length. Each
// complete line must come out once and in order, and an incomplete line never.
func FuzzStream(f *testing.F) {
	for i, line := range wireLines {
		f.Add([]byte(line+"\r\n"+line+"\n"), uint8(i*9))
	}
	f.Add([]byte("one\r\n\r\n \n two \nthr"), uint8(1))
	f.Add([]byte("\n\n \n  "), uint8(0))
	f.Add(bytes.Repeat([]byte("\n"), 300), uint8(255))
	f.Fuzz(func(t *testing.T, stream []byte, piece uint8) {
		if len(stream) > 4<<10 {
			return // longer inputs are slower and show nothing more
		}
		var want [][]byte
		lines := bytes.Split(stream, []byte{'\n'})
		for _, line := range lines[:len(lines)-1] {
			if line = bytes.TrimSpace(line); len(line) > 0 {
				want = append(want, line)
			}
		}
		half := len(bytes.TrimSpace(lines[len(lines)-1])) > 0
		s := bufio.NewScanner(&pieces{bytes.NewReader(stream), int(piece) + 1})
		s.Split(splitLines)
		var got [][]byte
		for s.Scan() {
			got = append(got, bytes.Clone(s.Bytes()))
		}
		if !slices.EqualFunc(got, want, bytes.Equal) {
			t.Errorf("lines of %q, %d bytes at a time\nwant %q\ngot  %q", stream, int(piece)+1, want, got)
		}
		if got := errors.Is(s.Err(), io.ErrUnexpectedEOF); got != half {
			t.Errorf("%q ends in half a line\nwant %v\ngot  %v", stream, half, s.Err())
		}
	})
}

// pieces is a connection that returns a few bytes per read.
type pieces struct {
	io.Reader
	most int
}

func (p *pieces) Read(b []byte) (int, error) { return p.Reader.Read(b[:min(len(b), p.most)]) }
