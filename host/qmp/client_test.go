package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// longEnough limits steps that must succeed; no test waits for it to pass.
const longEnough = time.Minute

// peer is the QEMU end of one connection, played by the test.
type peer struct {
	t     *testing.T
	conn  net.Conn
	lines *bufio.Scanner
}

// command is a command that the client sent.
type command struct {
	Execute   string
	Arguments json.RawMessage
	ID        uint64
}

// next returns the client's next command, or the zero command if the client has disconnected.
func (p *peer) next() command {
	var cmd command
	if p.lines.Scan() {
		if err := json.Unmarshal(p.lines.Bytes(), &cmd); err != nil {
			p.t.Errorf("the client sent %q: %v", p.lines.Text(), err)
		}
	}
	return cmd
}

func (p *peer) say(format string, args ...any) { fmt.Fprintf(p.conn, format+"\r\n", args...) }

func (p *peer) answer(cmd command, result string) { p.say(`{"return": %s, "id": %d}`, result, cmd.ID) }

// listen plays QEMU for one connection after the other and returns its socket. After the last one
// has arrived, nothing listens any more, as after QEMU's end.
func listen(t *testing.T, plays ...func(*peer)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qmp.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	played := make(chan struct{})
	go func() {
		defer close(played)
		for i, play := range plays {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if i == len(plays)-1 {
				l.Close()
			}
			lines := bufio.NewScanner(conn)
			lines.Buffer(nil, 8<<20)
			play(&peer{t, conn, lines})
			conn.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-played })
	return path
}

// negotiated plays QEMU after the negotiation.
func negotiated(play func(*peer)) func(*peer) {
	return func(p *peer) {
		p.say("%s", greetingLine)
		cmd := p.next()
		if cmd.Execute != "qmp_capabilities" && cmd.Execute != "" {
			p.t.Errorf("first command:\nwant qmp_capabilities\ngot  %q", cmd.Execute)
		}
		p.answer(cmd, "{}")
		play(p)
	}
}

// converse dials peers that have finished the negotiation when their play starts, one connection
// each.
func converse(t *testing.T, settle Settle, plays ...func(*peer)) *Client {
	t.Helper()
	for i, play := range plays {
		plays[i] = negotiated(play)
	}
	c, err := Dial(limited(t), listen(t, plays...), settle)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// dial is converse with a single connection.
func dial(t *testing.T, play func(*peer)) *Client { return converse(t, nil, play) }

func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), longEnough)
	t.Cleanup(cancel)
	return ctx
}

func TestDialReadsVersion(t *testing.T) {
	c := dial(t, func(p *peer) { p.next() })
	if want, got := "7.2.22 (Debian)", c.Version().String(); got != want {
		t.Errorf("version:\nwant %s\ngot  %s", want, got)
	}
}

func TestDialSaysThatSocketIsTaken(t *testing.T) {
	path := listen(t, func(p *peer) { p.next() }) // accepts the connection, but sends no greeting
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := Dial(ctx, path, nil)
	if !errors.Is(err, ErrNoGreeting) || !strings.Contains(err.Error(), path) {
		t.Errorf("want ErrNoGreeting and the path, got %v", err)
	}
}

func TestDialRefusesOtherProtocols(t *testing.T) {
	for _, line := range []string{"HTTP/1.1 400 Bad Request", `{"return": {}}`, ""} {
		path := listen(t, func(p *peer) { p.say("%s", line) })
		if _, err := Dial(limited(t), path, nil); err == nil {
			t.Errorf("%q taken for a greeting", line)
		}
	}
}

func TestAnswersAreMatchedById(t *testing.T) {
	c := dial(t, func(p *peer) {
		first, second := p.next(), p.next()
		p.answer(second, `"`+second.Execute+`"`)
		p.answer(first, `"`+first.Execute+`"`)
		p.next()
	})
	failures := make(chan error, 2)
	for _, name := range []string{"query-a", "query-b"} {
		go func() {
			var got string
			err := c.Execute(limited(t), name, nil, &got)
			if err == nil && got != name {
				err = fmt.Errorf("answer to %s is %s", name, got)
			}
			failures <- err
		}()
	}
	for range 2 {
		if err := <-failures; err != nil {
			t.Error(err)
		}
	}
}

func TestErrorIsTyped(t *testing.T) {
	c := dial(t, func(p *peer) {
		p.say(`{"id": %d, "error": {"class": "DeviceNotFound", "desc": "Device 'x' not found"}}`, p.next().ID)
		p.next()
	})
	err := c.Execute(limited(t), "device_del", map[string]string{"id": "x"}, nil)
	var qerr *Error
	if !errors.As(err, &qerr) || qerr.Class != DeviceNotFound {
		t.Errorf("want an *Error of class %s, got %v", DeviceNotFound, err)
	}
	if want, got := "qmp device_del: DeviceNotFound: Device 'x' not found", err.Error(); got != want {
		t.Errorf("error:\nwant %s\ngot  %s", want, got)
	}
}

func TestLateAnswerReachesNobody(t *testing.T) {
	given := make(chan struct{})
	c := dial(t, func(p *peer) {
		late := p.next()
		<-given
		p.answer(late, `"late"`)
		p.answer(p.next(), `"in time"`)
		p.next()
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Execute(ctx, "slow", nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("want %v, got %v", context.DeadlineExceeded, err)
	}
	close(given)
	var got string
	if err := c.Execute(limited(t), "quick", nil, &got); err != nil || got != "in time" {
		t.Errorf("want the answer in time, got %q, %v", got, err)
	}
}

func TestPeerThatDoesNotReadEndsTheConnection(t *testing.T) {
	over := make(chan struct{})
	c := dial(t, func(*peer) { <-over })
	defer close(over)
	// On a slow machine the first limits may pass before anything is written.
	for limit := 50 * time.Millisecond; c.Err() == nil && limit < longEnough; limit *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		if err := c.Execute(ctx, "big", strings.Repeat("x", 1<<20), nil); !errors.Is(err, ErrNotSent) {
			t.Errorf("a command that nobody read:\nwant %v\ngot  %v", ErrNotSent, err)
		}
		cancel()
	}
	<-c.Done()
	if err := c.Err(); err == nil || !strings.Contains(err.Error(), "does not read") {
		t.Errorf("reason:\nwant QEMU does not read\ngot  %v", err)
	}
}

func TestGarbageEndsTheConnectionWithReason(t *testing.T) {
	for _, test := range []struct{ name, line, want string }{
		{"no JSON", "\x00\x01garbage", "not a QMP line"},
		{"an answer never asked for", `{"return": {}, "id": 99}`, "command 99"},
		{"an answer without id", `{"error": {"class": "GenericError", "desc": "JSON parse error"}}`, "JSON parse error"},
		{"a second greeting", greetingLine, "second greeting"},
		{"an oversize line", strings.Repeat("x", MaxLine+1), "4194304 bytes"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := dial(t, func(p *peer) {
				p.next()
				p.say("%s", test.line)
				p.next()
			})
			err := c.Execute(limited(t), "query", nil, nil)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("in flight:\nwant %s\ngot  %v", test.want, err)
			}
			<-c.Done()
			if err := c.Execute(limited(t), "query", nil, nil); !errors.Is(err, c.Err()) {
				t.Errorf("afterwards:\nwant %v\ngot  %v", c.Err(), err)
			}
		})
	}
}

func TestAnswerJustBeforeTheEndCounts(t *testing.T) {
	c := dial(t, func(p *peer) { p.answer(p.next(), "{}") }) // and closes the connection, as QEMU does after quit
	if err := c.Execute(limited(t), "quit", nil, nil); err != nil {
		t.Error(err)
	}
	<-c.Done()
	if !errors.Is(c.Err(), io.EOF) {
		t.Errorf("reason:\nwant %v\ngot  %v", io.EOF, c.Err())
	}
}

func TestCloseFailsWhatIsInFlight(t *testing.T) {
	sent := make(chan struct{})
	c := dial(t, func(p *peer) { p.next(); close(sent); p.next() })
	failure := make(chan error)
	go func() { failure <- c.Execute(limited(t), "slow", nil, nil) }()
	<-sent
	c.Close()
	c.Close()
	if err := <-failure; !errors.Is(err, ErrClosed) {
		t.Errorf("want %v, got %v", ErrClosed, err)
	}
}

func TestSubscriberThatDoesNotReadDelaysNothing(t *testing.T) {
	const sent = eventBuffer + 10
	c := dial(t, func(p *peer) {
		cmd := p.next()
		for i := range sent {
			p.say(`{"event": "TICK", "data": {"n": %d}, "timestamp": {"seconds": 1, "microseconds": 2}}`, i)
			p.say(`{"event": "OTHER", "timestamp": {"seconds": 1, "microseconds": 2}}`)
		}
		p.answer(cmd, "{}")
		p.next()
	})
	ticks := c.Subscribe("TICK")
	if err := c.Execute(limited(t), "tick", nil, nil); err != nil {
		t.Fatal(err)
	}
	if want, got := uint64(sent-eventBuffer), ticks.Dropped(); got != want {
		t.Errorf("dropped:\nwant %d\ngot  %d", want, got)
	}
	c.Close()
	n := 0
	for e := range ticks.Events() {
		if want := fmt.Sprintf(`{"n": %d}`, n); string(e.Data) != want || e.Name != "TICK" {
			t.Errorf("event %d:\nwant TICK %s\ngot  %s %s", n, want, e.Name, e.Data)
		}
		n++
	}
	if n != eventBuffer {
		t.Errorf("events:\nwant %d\ngot  %d", eventBuffer, n)
	}
}

// The host's clock may be changed, and QEMU's timestamps follow it. The timestamp -1 means that
// QEMU could not read its clock.
func TestEventHasTheTimeAtWhichItWasRead(t *testing.T) {
	c := dial(t, func(p *peer) {
		cmd := p.next()
		p.say(`{"event": "TICK", "timestamp": {"seconds": 1, "microseconds": 2}}`)
		p.say(`{"event": "TICK", "timestamp": {"seconds": -1, "microseconds": -1}}`)
		p.answer(cmd, "{}")
		p.next()
	})
	ticks, before := c.Subscribe("TICK"), time.Now()
	if err := c.Execute(limited(t), "tick", nil, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if e := <-ticks.Events(); e.Time.Before(before) || e.Time.After(time.Now()) {
			t.Errorf("time\nwant one after %v\ngot  %v", before, e.Time)
		}
	}
}

func TestSubscriptionEndsOnce(t *testing.T) {
	c := dial(t, func(p *peer) { p.next() })
	s := c.Subscribe("X")
	s.Close()
	s.Close()
	if _, open := <-s.Events(); open {
		t.Error("a closed subscription gave an event")
	}
	c.Close()
	s.Close()
	if _, open := <-c.Subscribe("X").Events(); open {
		t.Error("a subscription on a connection that ended gave an event")
	}
}

// receive takes one command with a file, and returns the file.
func receive(t *testing.T, p *peer) *os.File {
	t.Helper()
	line, rights := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := p.conn.(*net.UnixConn).ReadMsgUnix(line, rights)
	if err != nil {
		t.Error(err)
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(rights[:n])
	if err != nil || len(messages) != 1 {
		t.Errorf("want one message with a file\ngot  %v, %v", messages, err)
		return nil
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		t.Errorf("want one file\ngot  %v, %v", fds, err)
		return nil
	}
	return os.NewFile(uintptr(fds[0]), "received")
}
