package agentlog

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/debugconsole"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// The ports of the log and of the debug console in these tests' guests. Kata's runtime uses the
// second port for the debug console, too.
const (
	logPort     = 1025
	consolePort = 1026
)

// bootTold boots a guest with more options on the kernel command line. The guest's image has a
// shell and vsock inside the guest.
func bootTold(t *testing.T, more string) *vm.Guest {
	t.Helper()
	shell, err := vm.Linked("/bin/sh", "/bin/sh")
	vmtest.Must(t, err)
	g := vmtest.Boot(t, vm.Options{Image: vmtest.Image(t, []string{"vsock_loopback"}, shell...), Append: more})
	t.Cleanup(func() {
		if err := vmtest.PowerOff(g); err != nil {
			t.Error(err)
		}
	})
	return g
}

func TestLogAndDebugConsoleFollowTheKernelCommandLine(t *testing.T) {
	g := bootTold(t, fmt.Sprintf("agent.log=debug agent.log_vport=%d agent.debug_console agent.debug_console_vport=%d agent.hotplug_timeout=soon", logPort, consolePort))
	t.Run("each reader gets the log from its first line", func(t *testing.T) {
		for range 2 {
			log := readLog(t, g)
			early := log.await(t, "agent.hotplug_timeout=soon")
			if early["level"] != "warning" || early["name"] != "directvol-agent" || early["pid"] != "1" {
				t.Errorf("want a warning of PID 1\ngot  %v", early)
			}
			vmtest.Must(t, g.Agent().Check(vmtest.Limited(t)))
			log.await(t, "CreateSandbox") // logged only at level debug
		}
	})
	t.Run("the console does not get it", func(t *testing.T) {
		var said bytes.Buffer
		g.Explain(&said)
		if strings.Contains(said.String(), `"msg"`) {
			t.Errorf("want no log line\ngot\n%s", &said)
		}
	})
	t.Run("a shell answers, and its status is known", func(t *testing.T) {
		conn, shell := openShell(t, g)
		say(t, conn, `test -t 0 && echo "terminal:$((6*7)) $(echo child)"`)
		if got := hear(t, shell, "terminal:"); got != "42 child" {
			t.Errorf("want 42 child\ngot  %s", got)
		}
		say(t, conn, "exit 7")
		_, err := io.Copy(io.Discard, shell)
		vmtest.Must(t, err)
		ended := readLog(t, g).await(t, "session ends")
		if ended["status"] != "exit 7" {
			t.Errorf("want exit 7\ngot  %v", ended)
		}
	})
	t.Run("a shell ends with its connection, and is waited for", func(t *testing.T) { hangUp(t, g) })
	t.Run("peers inside the guest get neither", func(t *testing.T) {
		for _, port := range []uint32{logPort, consolePort} {
			got, err := g.Remote.DialVsock(vmtest.Limited(t), remote.DialVsock{CID: unix.VMADDR_CID_LOCAL, Port: port, Send: []byte("\n"), Await: 1})
			vmtest.Must(t, err)
			if len(got.Data) != 0 {
				t.Errorf("port %d\nwant nothing\ngot  %q", port, got.Data)
			}
			readLog(t, g).await(t, "refused a connection: its peer is CID 1,")
		}
	})
	t.Run("shells at once are bounded", func(t *testing.T) { crowd(t, g) })
}

// crowd opens as many shells as the console allows, and one more. A shell of an earlier test may
// still be ending, and have its place.
func crowd(t *testing.T, g *vm.Guest) {
	for shells := 0; shells < debugconsole.MaxSessions; {
		conn, shell := openShell(t, g)
		say(t, conn, "echo up:")
		if _, err := shell.ReadString('\n'); err != nil {
			continue
		}
		hear(t, shell, "up:")
		shells++
	}
	_, shell := openShell(t, g)
	if line, err := shell.ReadString('\n'); !errors.Is(err, io.EOF) {
		t.Errorf("shell %d\nwant its connection closed\ngot  %q, error %v", debugconsole.MaxSessions+1, line, err)
	}
}

// hangUp checks from a second shell that no process of a first one is left: a zombie of it would
// still be visible.
func hangUp(t *testing.T, g *vm.Guest) {
	conn, shell := openShell(t, g)
	say(t, conn, "echo pid:$$; sh -c 'echo child:$$; exec /test-guest "+remote.BareEcho+"'")
	pid := hear(t, shell, "pid:")
	child := hear(t, shell, "child:")
	vmtest.Must(t, conn.Close())
	conn, shell = openShell(t, g)
	say(t, conn, fmt.Sprintf("while kill -0 %s || kill -0 %s; do :; done 2>/dev/null; echo both:gone", pid, child))
	hear(t, shell, "both:gone")
}

func TestDebugConsoleIsOnTheConsoleAndTheLogBesideIt(t *testing.T) {
	g := bootTold(t, "agent.debug_console agent.log=debug")
	ctx := vmtest.Limited(t)
	again := time.NewTicker(100 * time.Millisecond) // no event announces console output
	defer again.Stop()
	for {
		vmtest.Must(t, g.Agent().Check(ctx))
		var said bytes.Buffer
		g.Explain(&said)
		prompt := strings.Contains(said.String(), "\n# ") || strings.Contains(said.String(), "}# ")
		if prompt && strings.Contains(said.String(), `"terminal":"/dev/console"`) {
			break
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("want a shell's prompt and the log\ngot\n%s", &said)
		}
	}
	if conn, err := g.Dial(vmtest.Limited(t), consolePort); err == nil {
		conn.Close()
		t.Error("a port that was not asked for is open")
	}
}

// logReader reads the agent's log over vsock.
type logReader struct{ *bufio.Scanner }

func readLog(t *testing.T, g *vm.Guest) logReader {
	t.Helper()
	return logReader{bufio.NewScanner(connect(t, g, logPort))}
}

// await reads up to the line whose message contains text. Every line must be one JSON object with a
// time and a level.
func (l logReader) await(t *testing.T, text string) map[string]any {
	t.Helper()
	for l.Scan() {
		var line map[string]any
		vmtest.Must(t, json.Unmarshal(l.Bytes(), &line))
		ts, _ := line["ts"].(string)
		if _, err := time.Parse(time.RFC3339Nano, ts); err != nil || line["level"] == nil {
			t.Errorf("want a line with a time and a level\ngot  %s", l.Text())
		}
		if msg, _ := line["msg"].(string); strings.Contains(msg, text) {
			return line
		}
	}
	t.Fatalf("the log ends before a line with %q: %v", text, l.Err())
	return nil
}

// connect connects to a port of the guest, with a time limit for all further work on the
// connection.
func connect(t *testing.T, g *vm.Guest, port uint32) net.Conn {
	t.Helper()
	ctx := vmtest.Limited(t)
	conn, err := g.Dial(ctx, port)
	vmtest.Must(t, err)
	t.Cleanup(func() { conn.Close() })
	deadline, _ := ctx.Deadline()
	vmtest.Must(t, conn.SetDeadline(deadline))
	return conn
}

func openShell(t *testing.T, g *vm.Guest) (net.Conn, *bufio.Reader) {
	t.Helper()
	conn := connect(t, g, consolePort)
	return conn, bufio.NewReader(conn)
}

// say types a line.
func say(t *testing.T, conn net.Conn, line string) {
	t.Helper()
	_, err := io.WriteString(conn, line+"\n")
	vmtest.Must(t, err)
}

// hear reads up to a line that an echo wrote, possibly after the prompt, and returns the text after
// the mark.
func hear(t *testing.T, shell *bufio.Reader, mark string) string {
	t.Helper()
	var heard []string
	for {
		line, err := shell.ReadString('\n')
		if _, rest, found := strings.Cut(line, mark); found && !strings.Contains(line, "echo ") {
			return strings.TrimSpace(rest)
		}
		if heard = append(heard, line); err != nil {
			t.Fatal(errors.Join(fmt.Errorf("want a line with %q\ngot  %q", mark, heard), err))
		}
	}
}
