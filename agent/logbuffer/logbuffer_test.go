package logbuffer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
)

// limit ends a test that hangs; no test measures it.
const limit = time.Minute

func newLog() (*logrus.Logger, *Buffer) {
	log := logrus.New()
	return log, New(log, logrus.Fields{"name": "agent", "pid": "7"})
}

// line has the fields of a log line in these tests.
type line struct {
	Msg, Level, Name, Pid, Code, Error string
	TS                                 time.Time
	Lost, N, Bytes                     int
}

// reading starts a reader of the buffer, and returns a scanner of its lines.
func reading(t *testing.T, j *Buffer) *bufio.Scanner {
	t.Helper()
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() {
		defer close(over)
		_ = j.Reader().CopyTo(ctx, w)
	}()
	late := time.AfterFunc(limit, func() { w.CloseWithError(errors.New("nothing comes")) })
	t.Cleanup(func() {
		cancel()
		r.Close()
		<-over
		late.Stop()
	})
	return bufio.NewScanner(r)
}

// next reads a line, which is one JSON object.
func next(t *testing.T, lines *bufio.Scanner) (l line) {
	t.Helper()
	if !lines.Scan() {
		t.Fatalf("want another line\ngot  the end, %v", lines.Err())
	}
	if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
		t.Fatalf("want a JSON object\ngot  %q, %v", lines.Text(), err)
	}
	return l
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestEachLineIsAnObjectWithKatasNames(t *testing.T) {
	log, j := newLog()
	lines := reading(t, j)
	before := time.Now()
	log.WithField("code", codes.NotFound).WithError(errors.New("two\nlines")).Warn(`a "<message>"`)
	got := next(t, lines)
	if got.TS.Before(before.Truncate(0)) || got.TS.After(time.Now()) {
		t.Errorf("ts\nwant the time, after %v\ngot  %v", before, got.TS)
	}
	got.TS = time.Time{}
	want := line{Msg: `a "<message>"`, Level: "warning", Name: "agent", Pid: "7", Code: "NotFound", Error: "two\nlines"}
	if got != want {
		t.Errorf("\nwant %+v\ngot  %+v", want, got)
	}
}

func TestLateReaderGetsWhatWasLoggedBeforeItCame(t *testing.T) {
	log, j := newLog()
	log.Info("early")
	for range 2 {
		lines := reading(t, j)
		if got := next(t, lines).Msg; got != "early" {
			t.Errorf("want early\ngot  %s", got)
		}
	}
}

func TestWithoutAReaderTheLastLinesAreKeptAndTheOthersCounted(t *testing.T) {
	log, j := newLog()
	const all = 5000
	for n := range all {
		log.WithField("n", n).Info(strings.Repeat("x", 100))
	}
	if j.bytes > KeptBytes {
		t.Errorf("bytes kept\nwant at most %d\ngot  %d", KeptBytes, j.bytes)
	}
	lines := reading(t, j)
	first := next(t, lines)
	if first.Lost == 0 || first.Level != "warning" || first.Name != "agent" {
		t.Errorf("want a line that tells what is lost\ngot  %+v", first)
	}
	for n := first.Lost; n < all; n++ {
		if got := next(t, lines).N; got != n {
			t.Fatalf("after %d lost lines\nwant line %d\ngot  %d", first.Lost, n, got)
		}
	}
}

// One reader takes nothing for a while, one never takes anything, and one keeps up.
func TestSlowReaderDelaysNoOtherAndGetsTheCountOfLostLines(t *testing.T) {
	log, j := newLog()
	slow, prompt := reading(t, j), reading(t, j)
	reading(t, j)
	const all = 20000
	for n := range all {
		log.WithField("n", n).Info(strings.Repeat("x", 100))
	}
	log.WithField("n", all).Info("last")
	for name, lines := range map[string]*bufio.Scanner{"slow": slow, "prompt": prompt} {
		seen, lost := 0, 0
		for {
			l := next(t, lines)
			if l.Lost > 0 {
				lost += l.Lost
				continue
			}
			if l.N != seen+lost {
				t.Fatalf("%s reader, after %d lines and %d lost\nwant line %d\ngot  %d", name, seen, lost, seen+lost, l.N)
			}
			if seen++; l.Msg == "last" {
				break
			}
		}
		if seen+lost != all+1 {
			t.Errorf("%s reader\nwant %d lines, read or lost\ngot  %d", name, all+1, seen+lost)
		}
	}
}

func TestTooLongLineDropsNoOtherLine(t *testing.T) {
	log, j := newLog()
	log.Info("before")
	log.Info(strings.Repeat("é", maxLine))
	lines := reading(t, j)
	if got := next(t, lines).Msg; got != "before" {
		t.Errorf("want before\ngot  %s", got)
	}
	if got := next(t, lines); got.Bytes <= maxLine {
		t.Errorf("want a line that tells its length\ngot  %+v", got)
	}
}

func TestFlushWaitsOnlyForLiveReaders(t *testing.T) {
	log, j := newLog()
	var text bytes.Buffer
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error, 1)
	r := j.Reader()
	for range 101 {
		log.Info("line")
	}
	go func() { over <- r.CopyTo(ctx, &text) }()
	j.Flush(t.Context())
	if got := strings.Count(text.String(), "\n"); got != 101 {
		t.Errorf("lines written\nwant 101\ngot  %d", got)
	}
	cancel()
	<-over
	reading(t, j) // takes nothing
	log.Info("last")
	short, cancel := context.WithCancel(t.Context())
	cancel()
	j.Flush(short)
}

// served serves a buffer at a unix socket, and returns a function that connects to it.
func served(t *testing.T, j *Buffer) (dial func() net.Conn, over <-chan error, l net.Listener) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "log.sock")
	l, err := net.Listen("unix", path)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- j.Serve(ctx, l) }()
	t.Cleanup(cancel)
	return func() net.Conn {
		conn, err := net.Dial("unix", path)
		must(t, err)
		must(t, conn.SetDeadline(time.Now().Add(limit)))
		t.Cleanup(func() { conn.Close() })
		return conn
	}, ended, l
}

func TestReadersThatHangUpOrDoNotReadBlockNoOther(t *testing.T) {
	log, j := newLog()
	dial, over, l := served(t, j)
	for n := range 5 * MaxReaders {
		conn := dial() // takes nothing
		if n%2 == 0 {
			conn.Close()
		}
		log.Info(strings.Repeat("x", 30000))
	}
	lines := bufio.NewScanner(dial())
	log.Info("now")
	for next(t, lines).Msg != "now" {
	}
	for { // readers that have lost their seats leave when they run next
		j.mu.Lock()
		readers, left := len(j.readers), j.idle.await()
		j.mu.Unlock()
		if readers <= MaxReaders {
			break
		}
		<-left
	}
	l.Close()
	if err := <-over; !errors.Is(err, net.ErrClosed) {
		t.Errorf("want the listener's end\ngot  %v", err)
	}
	if lines.Scan() {
		t.Errorf("want no line after the end\ngot  %s", lines.Text())
	}
}

func TestReaderAboveTheLimitReplacesTheOldest(t *testing.T) {
	log, j := newLog()
	dial, _, _ := served(t, j)
	log.Info("first")
	var all []*bufio.Scanner
	for range MaxReaders + 1 {
		lines := bufio.NewScanner(dial())
		next(t, lines) // the reader has its seat now
		all = append(all, lines)
	}
	if all[0].Scan() {
		t.Errorf("want the end\ngot  %s", all[0].Text())
	}
	log.Info("second")
	for i, lines := range all[1:] {
		if got := next(t, lines).Msg; got != "second" {
			t.Errorf("reader %d\nwant second\ngot  %s", i+1, got)
		}
	}
}

func TestConcurrentLoggingAndReading(t *testing.T) {
	log, j := newLog()
	var writers sync.WaitGroup
	for w := range 4 {
		writers.Go(func() {
			for n := range 500 {
				log.Info(fmt.Sprint("line ", n, " of ", w))
			}
		})
	}
	var readers sync.WaitGroup
	for range 3 {
		lines := reading(t, j)
		readers.Go(func() {
			for n := 0; n < 2000 && lines.Scan(); n++ {
			}
		})
	}
	writers.Wait()
	readers.Wait()
}
