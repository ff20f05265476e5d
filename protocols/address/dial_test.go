package address

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// listen serves one connection on a unix socket and returns the socket's path.
func listen(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		serve(conn)
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return path
}

func TestDialUnix(t *testing.T) {
	path := listen(t, func(conn net.Conn) { io.Copy(conn, conn) })
	conn, err := Address{Scheme: Unix, Path: path}.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	sayHello(t, conn)
}

func TestDialAbstract(t *testing.T) {
	name := "@directvol-address-test-" + filepath.Base(t.TempDir()) + fmt.Sprint(time.Now().UnixNano())
	l, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := Address{Scheme: Unix, Path: name}.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

func TestDialHybridLeavesWhatFollowsTheAnswer(t *testing.T) {
	asked := make(chan string, 1)
	path := listen(t, func(conn net.Conn) {
		r := bufio.NewReader(conn)
		line, _ := r.ReadString('\n')
		asked <- line
		io.WriteString(conn, "OK 1073741824\nhello") // in one segment: a dialler that buffers its reads would lose the greeting
		io.Copy(io.Discard, r)
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	conn, err := Address{Scheme: HVSock, Path: path, Port: 1024}.Dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	cancel() // the connection must outlive the context that dialled it
	if want, got := "CONNECT 1024\n", <-asked; got != want {
		t.Errorf("asked\nwant %q\ngot  %q", want, got)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
		t.Errorf("after the answer\nwant %q\ngot  %q, %v", "hello", got, err)
	}
}

func TestDialHybridSaysWhatWentWrong(t *testing.T) {
	for name, c := range map[string]struct{ answer, reason string }{
		"closed":    {"", "nobody listens on port 1024 in the guest"},
		"half line": {"OK", "nobody listens on port 1024 in the guest"},
		"refused":   {"ERR no\n", `answered with "ERR no", not OK`},
		"http":      {"HTTP/1.1 400 Bad Request\r\n", "not OK"},
		"endless":   {"OK " + strings.Repeat("1", 1<<10), "no end of line"},
		"binary":    {"OKAY\x00\n", "not OK"},
	} {
		t.Run(name, func(t *testing.T) {
			path := listen(t, func(conn net.Conn) {
				bufio.NewReader(conn).ReadString('\n')
				io.WriteString(conn, c.answer)
			})
			a := Address{Scheme: HVSock, Path: path, Port: 1024}
			_, err := a.Dial(t.Context())
			if err == nil || !strings.Contains(err.Error(), c.reason) || !strings.Contains(err.Error(), a.String()) {
				t.Errorf("want an error with %q and %q\ngot  %v", c.reason, a, err)
			}
		})
	}
}

// vmms play the devices that speak the dialect. Each reads the line and words its answer in its own
// way (Firecracker's src/vmm/src/devices/virtio/vsock/unix/muxer.rs, Cloud Hypervisor's
// virtio-devices/src/vsock/unix/muxer.rs, directvol's host/vhostvsock). To refuse, all of them
// close the connection without an answer.
var vmms = map[string]func(conn net.Conn) (line string){
	// Firecracker reads ten bytes first; a line that has not arrived completely with them is an
	// error.
	"firecracker": func(conn net.Conn) string {
		b := make([]byte, 32)
		n, err := io.ReadFull(conn, b[:10])
		if err != nil || b[n-1] == '\n' {
			return string(b[:n])
		}
		raw, err := conn.(*net.UnixConn).SyscallConn()
		if err == nil {
			err = raw.Read(func(fd uintptr) bool {
				more, _, _ := unix.Recvfrom(int(fd), b[n:], unix.MSG_DONTWAIT)
				n += max(more, 0)
				return true
			})
		}
		if err != nil {
			return err.Error()
		}
		return string(b[:n])
	},
	// Cloud Hypervisor reads byte by byte, as they arrive.
	"cloud hypervisor": func(conn net.Conn) string {
		var line []byte
		for b := make([]byte, 1); len(line) < 32 && !bytes.HasSuffix(line, []byte("\n")); line = append(line, b[0]) {
			if _, err := conn.Read(b); err != nil {
				break
			}
		}
		return string(line)
	},
}

func TestDialHybridReachesEachVMM(t *testing.T) {
	for name, readLine := range vmms {
		for _, port := range []uint32{0, 9, 1024, 4294967294} {
			path := listen(t, func(conn net.Conn) {
				if got, want := readLine(conn), fmt.Sprintf("CONNECT %d\n", port); got != want {
					t.Errorf("%s was asked\nwant %q\ngot  %q", name, want, got)
					return
				}
				io.WriteString(conn, "OK 1073741824\n") // the number of the host-side port
				io.Copy(conn, conn)
			})
			conn, err := Address{Scheme: HVSock, Path: path, Port: port}.Dial(t.Context())
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			sayHello(t, conn)
			conn.Close()
		}
	}
}

func TestDialHybridSaysThatEachVMMRefuses(t *testing.T) {
	refusals := map[string]func(net.Conn){"connected to too many": func(net.Conn) {}} // the device accepts, and closes before it reads
	for name, readLine := range vmms {
		refusals[name] = func(conn net.Conn) { readLine(conn) }
	}
	for name, refuse := range refusals {
		a := Address{Scheme: HVSock, Path: listen(t, refuse), Port: 1024}
		if conn, err := a.Dial(t.Context()); err == nil || conn != nil || !strings.Contains(err.Error(), "nobody listens on port 1024 in the guest") {
			t.Errorf("%s\nwant no connection, and that nobody listens on port 1024\ngot  %v", name, err)
		}
	}
}

func TestDialHybridEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	path := listen(t, func(conn net.Conn) {
		bufio.NewReader(conn).ReadString('\n')
		cancel()
		io.Copy(io.Discard, conn) // never answers
	})
	_, err := Address{Scheme: HVSock, Path: path, Port: 1024}.Dial(ctx)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("want %v\ngot  %v", context.Canceled, err)
	}
}

func TestDialNamesTheAddress(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	for _, a := range []Address{
		{Scheme: Unix, Path: missing},
		{Scheme: HVSock, Path: missing, Port: 1024},
		{Scheme: Unix, Path: "relative"},
		{Scheme: "tcp", Path: "localhost"},
		{},
	} {
		if _, err := a.Dial(t.Context()); err == nil || !strings.Contains(err.Error(), a.String()) {
			t.Errorf("want an error with %q\ngot  %v", a, err)
		}
	}
}

func sayHello(t *testing.T, conn net.Conn) {
	t.Helper()
	if _, err := io.WriteString(conn, "hello"); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
		t.Errorf("want %q\ngot  %q, %v", "hello", got, err)
	}
}

func TestDialVSockEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	a := Address{Scheme: VSock, CID: 4294967294, Port: 1024}
	conn, err := a.Dial(ctx)
	if conn != nil || err == nil || !strings.Contains(err.Error(), a.String()) {
		t.Errorf("want an error with %q and no connection\ngot  %v, %v", a, err, conn)
	}
}
