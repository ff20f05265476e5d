package agentclient

import (
	"bytes"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// ttrpc's server logs to the standard logger for every connection that a test breaks.
func init() { logrus.SetOutput(io.Discard) }

// logged counts the lines that reach the standard logger, which ttrpc uses.
type logged struct{ lines atomic.Int64 }

func (l *logged) Levels() []logrus.Level   { return logrus.AllLevels }
func (l *logged) Fire(*logrus.Entry) error { l.lines.Add(1); return nil }

func countLog(t *testing.T) *logged {
	t.Helper()
	l := &logged{}
	hooks := logrus.LevelHooks{}
	hooks.Add(l)
	old := logrus.StandardLogger().ReplaceHooks(hooks)
	t.Cleanup(func() { logrus.StandardLogger().ReplaceHooks(old) })
	return l
}

func TestGuestCannotFloodTheHostsLog(t *testing.T) {
	log := countLog(t)
	for name, flood := range map[string]string{
		"streams that wait for nothing": strings.Repeat("\x00\x00\x00\x00\x00\x00\x00\x07\x02\x00", 1<<16),
		"one answer again and again":    strings.Repeat("\x00\x00\x00\x00\x00\x00\x00\x01\x02\x00", 1<<16),
		"bytes":                         strings.Repeat("\xff", 1<<20),
	} {
		c := dial(t, hostile(t, flood), Config{Timeout: time.Hour})
		c.Check(t.Context())
		c.link.client.UserOnCloseWait(t.Context()) // the client has read all that it will read
		if got := log.lines.Swap(0); got > 1 {
			t.Errorf("%s\nwant at most a line for the call\ngot  %d", name, got)
		}
	}
}

// TestCallsLeftUnansweredAreBounded: the state kept for abandoned calls must not grow without
// limit.
func TestCallsLeftUnansweredAreBounded(t *testing.T) {
	ours, theirs := net.Pipe()
	defer theirs.Close()
	go io.Copy(io.Discard, theirs)
	g := newGuardedConn(ours, time.Hour)
	for i := range uint32(maxOwed) {
		if _, err := g.Write(ttrpcframe.Header{StreamID: 2*i + 1, Type: ttrpcframe.TypeRequest}.Append(nil)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := g.Write(ttrpcframe.Header{StreamID: 2*maxOwed + 1, Type: ttrpcframe.TypeRequest}.Append(nil)); err == nil {
		t.Errorf("request %d\nwant an error\ngot  none", maxOwed+1)
	}
	if got := g.requests(); got != maxOwed {
		t.Errorf("requests\nwant %d\ngot  %d", maxOwed, got)
	}
}

// recorded is a connection that accepts all data and records its write deadlines.
type recorded struct {
	net.Conn
	limits []time.Duration
}

func (r *recorded) Write(p []byte) (int, error) { return len(p), nil }
func (r *recorded) SetWriteDeadline(at time.Time) error {
	r.limits = append(r.limits, time.Until(at))
	return nil
}

func TestWritesAreLimitedWhileACallIsOverdue(t *testing.T) {
	conn := &recorded{}
	g := newGuardedConn(conn, time.Hour)
	request := func(id uint32) {
		if _, err := g.Write(ttrpcframe.Header{StreamID: id, Type: ttrpcframe.TypeRequest}.Append(nil)); err != nil {
			t.Fatal(err)
		}
	}
	request(1)
	g.limitWrites() // between two writes: limits the next one
	g.limitWrites()
	request(3)
	g.relax()
	request(5) // one call is still overdue
	g.relax()
	request(7)
	g.setWriting()
	g.limitWrites() // during a write
	want := []bool{false, true, true, false, false, true}
	var got []bool
	for _, limit := range conn.limits {
		got = append(got, limit <= lateWriteLimit)
	}
	if !slices.Equal(got, want) {
		t.Errorf("writes that are limited\nwant %v\ngot  %v, by limits %v", want, got, conn.limits)
	}
}

// FuzzGuard passes arbitrary bytes from a guest, in pieces of any size, to a reader, while answers
// are due on streams 1 and 3. Each is a response, or a stream of data on a connection for streams.
func FuzzGuard(f *testing.F) {
	answer := func(stream uint32, length int) []byte {
		return append(ttrpcframe.Header{Length: uint32(length), StreamID: stream, Type: ttrpcframe.TypeResponse}.Append(nil), make([]byte, length)...)
	}
	data := func(flags byte) []byte {
		return append(ttrpcframe.Header{Length: 3, StreamID: 1, Type: ttrpcframe.TypeData, Flags: flags}.Append(nil), "abc"...)
	}
	for _, stream := range []bool{false, true} {
		f.Add(append(answer(3, 20), answer(1, 0)...), uint8(7), stream)
		f.Add(append(answer(1, 0), answer(1, 0)...), uint8(1), stream)
		f.Add(answer(5, 4), uint8(255), stream)
		f.Add(answer(1, 3)[:12], uint8(3), stream)
		f.Add(ttrpcframe.Header{StreamID: 1, Type: ttrpcframe.TypeData}.Append(nil), uint8(9), stream)
		f.Add(append(bytes.Repeat(data(0), 2*maxUnread), data(ttrpcframe.FlagRemoteClosed)...), uint8(11), stream)
		f.Add(append(data(ttrpcframe.FlagRemoteClosed), data(0)...), uint8(30), stream)
		f.Add([]byte("\xff\xff\xff\xff\x00\x00\x00\x01\x02\x00"), uint8(4), stream)
	}
	f.Fuzz(func(t *testing.T, sent []byte, piece uint8, stream bool) {
		if len(sent) > 4<<10 {
			return // longer inputs are slower and show nothing more
		}
		in := &scripted{Reader: bytes.NewReader(sent), piece: int(piece)}
		g := newGuardedConn(in, 0)
		if stream {
			g = newStreamConn(in, 0)
			g.unread = make(chan struct{}, len(sent)+1) // nobody takes the messages
		}
		g.owe(ttrpcframe.Header{StreamID: 1})
		g.owe(ttrpcframe.Header{StreamID: 3})
		got, err := io.ReadAll(g)
		if (err != nil) != (g.violation() != nil) || (err != nil) != in.closed {
			t.Errorf("read ended with %v, the violation is %v, closed: %v", err, g.violation(), in.closed)
		}
		if err == nil && !bytes.Equal(got, sent) {
			t.Errorf("admitted\nwant %x\ngot  %x", sent, got)
		}
		if want := admissible(sent, stream); (err == nil) != want {
			t.Errorf("%x\nwant it admitted: %v\ngot  %v", sent, want, err)
		}
	})
}

// admissible decides independently whether a guest may send these bytes.
func admissible(sent []byte, stream bool) bool {
	due := map[uint32]bool{1: true, 3: true}
	for len(sent) >= ttrpcframe.HeaderBytes {
		h := ttrpcframe.ParseHeader(sent)
		isData := stream && h.Type == ttrpcframe.TypeData
		if !due[h.StreamID] || h.Type != ttrpcframe.TypeResponse && !isData || h.Length > maxAnswer {
			return false
		}
		due[h.StreamID] = isData && h.Flags&1 == 0
		sent = sent[min(ttrpcframe.HeaderBytes+int(h.Length), len(sent)):]
	}
	return true
}

// scripted is a connection that returns a few bytes per read.
type scripted struct {
	net.Conn
	io.Reader
	piece  int
	closed bool
}

func (s *scripted) Read(p []byte) (int, error) { return s.Reader.Read(p[:min(len(p), 1+s.piece)]) }
func (s *scripted) Close() error               { s.closed = true; return nil }
