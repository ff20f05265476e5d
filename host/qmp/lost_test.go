package qmp

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// hangUp plays a QEMU that closes the connection.
func hangUp(*peer) {}

// serve answers each command with the command's name, until the client has disconnected.
func serve(p *peer) {
	for cmd := p.next(); cmd.Execute != ""; cmd = p.next() {
		p.answer(cmd, `"`+cmd.Execute+`"`)
	}
}

// echoes checks that the Client works.
func echoes(t *testing.T, c *Client) {
	t.Helper()
	var got string
	if err := c.Execute(limited(t), "echo", nil, &got); err != nil || got != "echo" {
		t.Errorf("a command:\nwant its answer\ngot  %q, %v", got, err)
	}
}

func TestDeadlineBeforeTheFirstByteEndsNoConnection(t *testing.T) {
	c := dial(t, serve)
	for range 60 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
		<-ctx.Done()
		err := c.Execute(ctx, "late", nil, nil)
		cancel()
		if !errors.Is(err, ErrNotSent) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("want %v and %v\ngot  %v", ErrNotSent, context.DeadlineExceeded, err)
		}
	}
	echoes(t, c)
	if want, got := uint64(1), c.Connection(); got != want {
		t.Errorf("connection:\nwant %d\ngot  %d", want, got)
	}
}

// The socket's own deadline passes between the check of the context and the write.
func TestSocketDeadlineBeforeTheFirstByteEndsNoConnection(t *testing.T) {
	c := dial(t, serve)
	past := deadlined{t.Context(), time.Unix(1, 0)}
	if err := c.conn.write(past, []byte("{}\n"), nil); !errors.Is(err, ErrNotSent) || !errors.Is(err, os.ErrDeadlineExceeded) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("want %v, %v and %v\ngot  %v", ErrNotSent, os.ErrDeadlineExceeded, context.DeadlineExceeded, err)
	}
	echoes(t, c)
	if want, got := uint64(1), c.Connection(); got != want {
		t.Errorf("connection:\nwant %d\ngot  %d", want, got)
	}
}

// deadlined is a context whose deadline has passed but is not yet noticed.
type deadlined struct {
	context.Context
	at time.Time
}

func (d deadlined) Deadline() (time.Time, bool) { return d.at, true }

func TestCommandBehindAnotherIsNotSentAfterItsDeadline(t *testing.T) {
	read := make(chan struct{})
	c := dial(t, func(p *peer) {
		<-read
		serve(p)
	})
	big := make(chan error, 1)
	go func() { big <- c.Execute(limited(t), "big", strings.Repeat("x", 4<<20), nil) }()
	for len(c.conn.writing) == 0 { // until the large command is being written
		runtime.Gosched()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := c.Execute(ctx, "small", nil, nil); !errors.Is(err, ErrNotSent) {
		t.Errorf("want %v\ngot  %v", ErrNotSent, err)
	}
	close(read)
	if err := <-big; err != nil {
		t.Error(err)
	}
	echoes(t, c)
}

func TestPartialWriteIsDialledAgain(t *testing.T) {
	over := make(chan struct{})
	c := converse(t, nil, func(*peer) { <-over }, serve)
	for limit := 50 * time.Millisecond; ; limit *= 2 { // on a busy machine the limit may pass before the first byte
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		err := c.Execute(ctx, "big", strings.Repeat("x", 1<<20), nil)
		cancel()
		if !errors.Is(err, ErrNotSent) || errors.Is(err, ErrOutcomeUnknown) {
			t.Errorf("half a command, which QEMU never carries out:\nwant %v\ngot  %v", ErrNotSent, err)
		}
		if err == nil || strings.Contains(err.Error(), "does not read") || limit > longEnough {
			break
		}
	}
	close(over)
	echoes(t, c)
}

func TestCutInFlightIsAnUnknownOutcome(t *testing.T) {
	c := converse(t, nil, func(p *peer) { p.next() }, serve)
	err := c.Execute(limited(t), "device_add", nil, nil)
	if !errors.Is(err, ErrOutcomeUnknown) || !errors.Is(err, io.EOF) {
		t.Errorf("want %v and %v\ngot  %v", ErrOutcomeUnknown, io.EOF, err)
	}
	echoes(t, c)
	if want, got := uint64(2), c.Connection(); got != want {
		t.Errorf("connection:\nwant %d\ngot  %d", want, got)
	}
}

func TestCallAbandonedAfterItWasSentHasAnUnknownOutcome(t *testing.T) {
	c := dial(t, func(p *peer) { p.next(); serve(p) })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := c.Execute(ctx, "device_add", nil, nil)
	if !errors.Is(err, ErrOutcomeUnknown) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("want %v and %v\ngot  %v", ErrOutcomeUnknown, context.DeadlineExceeded, err)
	}
	echoes(t, c)
}

func TestQuestionIsAskedAgain(t *testing.T) {
	c := converse(t, nil, func(p *peer) { p.next() }, func(p *peer) { p.next() }, serve)
	var got string
	if err := c.Execute(limited(t), "query-block", nil, &got); err != nil || got != "query-block" {
		t.Errorf("want its answer\ngot  %q, %v", got, err)
	}
}

func TestAnswerToALostConnectionReachesNobody(t *testing.T) {
	var lost command
	c := converse(t, nil, func(p *peer) { lost = p.next() }, func(p *peer) {
		cmd := p.next()
		p.answer(lost, `"late"`)
		p.answer(cmd, `"in time"`)
		p.next()
	})
	if err := c.Execute(limited(t), "slow", nil, nil); !errors.Is(err, ErrOutcomeUnknown) {
		t.Errorf("want %v\ngot  %v", ErrOutcomeUnknown, err)
	}
	var got string
	if err := c.Execute(limited(t), "quick", nil, &got); err != nil || got != "in time" {
		t.Errorf("want the answer in time\ngot  %q, %v", got, err)
	}
}

// A new connection first sends an event of its own, is then settled, and takes commands only after
// that.
func TestNewConnectionIsSettledBeforeItIsUsed(t *testing.T) {
	cut := make(chan struct{})
	settle := func(ctx context.Context, ask Ask) ([]Event, error) {
		var got string
		err := ask(ctx, "query-state", nil, &got)
		return []Event{{Name: "GONE"}}, err
	}
	var order []string
	c := converse(t, settle, func(*peer) { <-cut }, func(p *peer) {
		p.say(`{"event": "EARLY", "timestamp": {"seconds": 1, "microseconds": 2}}`)
		for cmd := p.next(); cmd.Execute != ""; cmd = p.next() {
			order = append(order, cmd.Execute)
			p.answer(cmd, `"`+cmd.Execute+`"`)
		}
	})
	events := c.Subscribe("EARLY", "GONE")
	close(cut)
	<-c.Subscribe("GONE").Events()
	echoes(t, c)
	c.Close()
	var got []string
	for e := range events.Events() {
		got = append(got, e.Name)
	}
	if want := "EARLY GONE"; strings.Join(got, " ") != want {
		t.Errorf("events:\nwant %s\ngot  %v", want, got)
	}
	if want := "query-state echo"; strings.Join(order, " ") != want {
		t.Errorf("commands of the new connection:\nwant %s\ngot  %v", want, order)
	}
}

func TestConnectionThatCannotBeSettledIsDialledAgain(t *testing.T) {
	var settled atomic.Int32
	settle := func(ctx context.Context, ask Ask) ([]Event, error) {
		settled.Add(1)
		return nil, ask(ctx, "query-state", nil, nil)
	}
	refuses := func(p *peer) {
		p.say(`{"error": {"class": "GenericError", "desc": "no"}, "id": %d}`, p.next().ID)
		p.next()
	}
	c := converse(t, settle, hangUp, refuses, func(p *peer) { p.next() }, serve)
	if err := c.Execute(limited(t), "echo", nil, nil); err != nil && !errors.Is(err, ErrOutcomeUnknown) {
		t.Error(err)
	}
	echoes(t, c)
	if want, got := int32(3), settled.Load(); got != want {
		t.Errorf("settled:\nwant %d times\ngot  %d", want, got)
	}
}

// If the greeting is cut off or does not arrive, the Client tries once more.
func TestNegotiationThatIsCutIsTriedAgain(t *testing.T) {
	path := listen(t, negotiated(hangUp), func(p *peer) { p.conn.Write([]byte(greetingLine[:20])) }, hangUp,
		func(p *peer) { p.say("%s", greetingLine); p.next() }, negotiated(serve))
	c, err := Dial(limited(t), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for err = ErrOutcomeUnknown; errors.Is(err, ErrOutcomeUnknown); { // the first connection may be cut while the command is in flight
		err = c.Execute(limited(t), "echo", nil, nil)
	}
	if err != nil {
		t.Error(err)
	}
}

func TestWaitForAConnectionEndsWithItsDeadline(t *testing.T) {
	over := make(chan struct{})
	defer close(over)
	path := listen(t, negotiated(hangUp), func(*peer) { <-over }, hangUp)
	c, err := Dial(limited(t), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.mu.Lock()
	conn := c.conn
	c.mu.Unlock()
	if conn != nil {
		<-conn.done
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err = c.Execute(ctx, "device_add", nil, nil)
	if !errors.Is(err, ErrNotSent) || !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, io.EOF) {
		t.Errorf("want %v, %v and why there is no connection\ngot  %v", ErrNotSent, context.DeadlineExceeded, err)
	}
}

func TestEndOfQEMUEndsTheClient(t *testing.T) {
	c := dial(t, func(p *peer) { p.next() })
	err := c.Execute(limited(t), "quit", nil, nil)
	if !errors.Is(err, ErrOutcomeUnknown) {
		t.Errorf("want %v\ngot  %v", ErrOutcomeUnknown, err)
	}
	<-c.Done()
	if err := c.Execute(limited(t), "query-status", nil, nil); !errors.Is(err, io.EOF) || !errors.Is(err, c.Err()) {
		t.Errorf("afterwards:\nwant %v\ngot  %v", c.Err(), err)
	}
}

func TestFileGoesWithItsCommand(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	if err := os.WriteFile(path, []byte("bytes"), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	got := make(chan string, 1)
	c := dial(t, func(p *peer) {
		text, _ := io.ReadAll(receive(t, p))
		got <- string(text)
		serve(p)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := c.ExecuteWithFile(ctx, "add-fd", map[string]int{"fdset-id": 1}, nil, file); !errors.Is(err, ErrOutcomeUnknown) {
		t.Errorf("want %v\ngot  %v", ErrOutcomeUnknown, err)
	}
	if text := <-got; text != "bytes" {
		t.Errorf("the file:\nwant bytes\ngot  %q", text)
	}
	echoes(t, c)
}

func TestClosedFileIsNotSentAndEndsNoConnection(t *testing.T) {
	c := dial(t, serve)
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	file.Close()
	err = c.ExecuteWithFile(limited(t), "add-fd", nil, nil, file)
	if !errors.Is(err, ErrNotSent) || !errors.Is(err, errFile) {
		t.Errorf("want %v and %v\ngot  %v", ErrNotSent, errFile, err)
	}
	echoes(t, c)
	if want, got := uint64(1), c.Connection(); got != want {
		t.Errorf("connection:\nwant %d\ngot  %d", want, got)
	}
}
