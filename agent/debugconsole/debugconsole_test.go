package debugconsole

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/transport"
	"github.com/directvol/directvol/protocols/address"
)

// limit ends a test that hangs; no test measures it.
const limit = time.Minute

// listeners are Go's own, whose connections offer the kernel's splice(2) and sendfile(2) to
// io.Copy, and the agent's, which accepts on vsock in a guest.
var listeners = map[string]func(path string) (net.Listener, error){
	"package net": func(path string) (net.Listener, error) { return net.Listen("unix", path) },
	"agent": func(path string) (net.Listener, error) {
		return transport.ListenStreams(address.Address{Scheme: address.Unix, Path: path}, MaxSessions, quiet())
	},
}

func quiet() *logrus.Entry {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return logrus.NewEntry(log)
}

// served is servedBy the agent's listener.
func served(t *testing.T, shells ...string) (dial func() net.Conn, log *lines) {
	t.Helper()
	return servedBy(t, listeners["agent"], shells...)
}

// servedBy serves a console at a unix socket, and returns a function that connects to it, and its
// log.
func servedBy(t *testing.T, listen func(string) (net.Listener, error), shells ...string) (dial func() net.Conn, log *lines) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "console.sock")
	l, err := listen(path)
	must(t, err)
	log = &lines{}
	logger := logrus.New()
	logger.SetOutput(log)
	console := &Console{Log: logrus.NewEntry(logger), Shells: shells}
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan error, 1)
	go func() { over <- console.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		<-over // no session is left
	})
	return func() net.Conn {
		conn, err := net.Dial("unix", path)
		must(t, err)
		must(t, conn.SetDeadline(time.Now().Add(limit)))
		t.Cleanup(func() { conn.Close() })
		return conn
	}, log
}

// lines is a log that can be read while it is written.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// say sends a line.
func say(t *testing.T, conn net.Conn, line string) {
	t.Helper()
	_, err := io.WriteString(conn, line+"\n")
	must(t, err)
}

// hear reads up to a line with mark, which a shell's echo has written, perhaps after its prompt. It
// returns the text after mark.
func hear(t *testing.T, r *bufio.Reader, mark string) string {
	t.Helper()
	var last []string
	for {
		line, err := r.ReadString('\n')
		if _, rest, found := strings.Cut(line, mark); found && !strings.Contains(line, "echo ") {
			return strings.TrimSpace(rest)
		}
		if last = append(last, line); len(last) > 10 {
			last = last[1:]
		}
		if err != nil {
			t.Fatalf("want a line with %q\ngot  …%q, %v", mark, last, err)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestEachConnectionHasAShellOnATerminalOfItsOwn(t *testing.T) {
	dial, log := served(t, "/bin/sh")
	var terminals []string
	for range 2 {
		conn := dial()
		r := bufio.NewReader(conn)
		say(t, conn, "echo at:$(tty) pid:$$")
		terminals = append(terminals, hear(t, r, "at:"))
		say(t, conn, "exec 3<>/dev/tty && echo owned:yes; exit 7")
		hear(t, r, "owned:yes")
		if _, err := io.Copy(io.Discard, r); err != nil {
			t.Errorf("after the shell's end\nwant the end\ngot  %v", err)
		}
	}
	if !strings.HasPrefix(terminals[0], "/dev/pts/") || terminals[0] == terminals[1] {
		t.Errorf("want two pseudo-terminals and shells\ngot  %q", terminals)
	}
	if want := `status="exit 7"`; strings.Count(log.String(), want) != 2 {
		t.Errorf("log: want two with %s\ngot\n%s", want, log)
	}
}

func TestOutputOfAShellIsCompleteAfterItsEnd(t *testing.T) {
	dial, _ := served(t, "/bin/sh")
	conn := dial()
	// A process that the shell leaves behind keeps the terminal open.
	say(t, conn, `trap "" HUP; sleep 1000 & echo left:$!; i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo line $i; done; echo last:$i; exit`)
	r := bufio.NewReader(conn)
	left := hear(t, r, "left:")
	hear(t, r, "last:3000")
	if _, err := io.Copy(io.Discard, r); err != nil {
		t.Errorf("after the shell's end\nwant the end\ngot  %v", err)
	}
	must(t, endProcess(left))
}

func endProcess(pid string) error {
	n := 0
	for _, digit := range pid {
		n = 10*n + int(digit-'0')
	}
	if n < 2 {
		return errors.New("no process: " + pid)
	}
	return unix.Kill(n, unix.SIGKILL)
}

// The paste is larger than the terminal's and the socket's buffers, so both directions have to
// wait.
func TestLongPasteComesBackWhole(t *testing.T) {
	for name, listen := range listeners {
		t.Run(name, func(t *testing.T) {
			dial, _ := servedBy(t, listen, "/bin/sh")
			conn := dial()
			r := bufio.NewReader(conn)
			paste := make([]byte, 1<<20)
			for i := range paste {
				paste[i] = byte('a' + i%23)
			}
			say(t, conn, "stty raw -echo; echo ready:; head -c "+strconv.Itoa(len(paste))+" | cat; echo over:")
			hear(t, r, "ready:")
			sent := make(chan error, 1)
			go func() {
				_, err := conn.Write(paste)
				sent <- err
			}()
			got := make([]byte, len(paste))
			_, err := io.ReadFull(r, got)
			if err != nil || !bytes.Equal(got, paste) {
				t.Errorf("want the %d bytes again\ngot  %.60q…, %v", len(paste), got, err)
			}
			must(t, <-sent)
		})
	}
}

// A pipe whose other end only the shell's foreground process has shows when that process ends.
func TestHangUpEndsTheShellAndItsForeground(t *testing.T) {
	for name, before := range map[string]string{"a shell": "", "one that ignores SIGHUP": `trap "" HUP; `} {
		dial, _ := served(t, "/bin/sh")
		fifo := filepath.Join(t.TempDir(), "alive")
		must(t, unix.Mkfifo(fifo, 0o600))
		conn := dial()
		say(t, conn, before+"cat > "+fifo)
		alive, err := os.Open(fifo)
		must(t, err)
		conn.Close()
		if _, err := io.Copy(io.Discard, alive); err != nil {
			t.Errorf("%s: want its foreground to end\ngot  %v", name, err)
		}
		alive.Close()
	}
}

func TestPeerThatDoesNotReadDelaysNoOther(t *testing.T) {
	dial, _ := served(t, "/bin/sh")
	deaf := dial()
	say(t, deaf, "while :; do echo and on; done")
	conn := dial()
	say(t, conn, "echo heard:$((6*7))")
	if got := hear(t, bufio.NewReader(conn), "heard:"); got != "42" {
		t.Errorf("want 42\ngot  %s", got)
	}
}

func TestGuestWithoutAShellSaysSo(t *testing.T) {
	dial, log := served(t, filepath.Join(t.TempDir(), "sh"), t.TempDir())
	got, err := io.ReadAll(dial())
	want := "no shell in this guest: put /bin/sh into the image"
	if err != nil || !strings.Contains(string(got), want) {
		t.Errorf("want %s\ngot  %q, %v", want, got, err)
	}
	if !strings.Contains(log.String(), want) {
		t.Errorf("log: want %s\ngot  %s", want, log)
	}
	console := &Console{Log: logrus.NewEntry(logrus.New()), Shells: []string{t.TempDir()}}
	if err := console.RunOn(t.Context(), "/dev/console"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("on a terminal: want %s\ngot  %v", want, err)
	}
}

func TestShellOnATerminalIsStartedAgain(t *testing.T) {
	ours, end, err := openTerminal()
	must(t, err)
	defer ours.Close()
	defer end.Close()
	must(t, ours.SetReadDeadline(time.Now().Add(limit)))
	console := &Console{Log: quiet(), Shells: []string{"/bin/sh"}}
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error, 1)
	go func() { over <- console.RunOn(ctx, end.Name()) }()
	r := bufio.NewReader(ours)
	var pids []string
	for range 2 {
		_, err := io.WriteString(ours, "echo pid:$$; exit\n")
		must(t, err)
		pids = append(pids, hear(t, r, "pid:"))
	}
	if pids[0] == pids[1] {
		t.Errorf("want another shell\ngot  %q", pids)
	}
	cancel()
	if err := <-over; !errors.Is(err, context.Canceled) {
		t.Errorf("want its end\ngot  %v", err)
	}
}

// A shell that goes on after its terminal has hung up is killed, and not before hangUpLimit.
func TestShellThatGoesOnAfterTheHangUpIsKilled(t *testing.T) {
	terminal, end, err := openTerminal()
	must(t, err)
	process, exited, err := start("/bin/sh", end)
	end.Close()
	must(t, err)
	// The inner shell has no job control. With it, a shell ends if it starts a job after the
	// hang-up.
	fmt.Fprintln(terminal, `exec sh -c 'trap "" HUP; echo deaf; while :; do sleep 60; done'`)
	// The shell's prompt may be on the same line.
	for lines := bufio.NewScanner(terminal); lines.Scan() && !strings.HasSuffix(lines.Text(), "deaf"); {
	}
	synctest.Test(t, func(t *testing.T) {
		ended := make(chan unix.WaitStatus)
		go func() {
			<-time.After(hangUpLimit - 1)
			if err := process.Signal(unix.Signal(0)); err != nil {
				t.Errorf("just before its time is over: %v", err)
			}
			<-time.After(2)
			ended <- <-exited
		}()
		began := time.Now()
		status := hangUp(terminal, process, ended)
		if status.Signal() != unix.SIGKILL {
			t.Errorf("want it killed\ngot  %v", told(status))
		}
		if took := time.Since(began); took != hangUpLimit+1 {
			t.Errorf("want it killed after %v\ngot  %v", hangUpLimit, took)
		}
	})
}

func TestTerminalThatIsKeptOpenIsReadForAWhile(t *testing.T) {
	terminal, end, err := openTerminal()
	must(t, err)
	defer terminal.Close()
	defer end.Close() // a process that the shell has left behind
	here, peer := net.Pipe()
	defer here.Close()
	defer peer.Close()
	said := make(chan struct{})
	go relay(here, terminal, said)
	began := time.Now()
	awaitLastWords(t.Context(), terminal, here, nil, said)
	if took := time.Since(began); took < lastWords {
		t.Errorf("want it read for %v\ngot  %v", lastWords, took)
	}
}
