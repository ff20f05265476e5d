package vhostvsock

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// warnings is a log hook that passes warnings on.
type warnings chan string

func (w warnings) Levels() []logrus.Level     { return []logrus.Level{logrus.WarnLevel} }
func (w warnings) Fire(e *logrus.Entry) error { w <- e.Message; return nil }

func warningLog() (logrus.FieldLogger, warnings) {
	log, w := logrus.New(), make(warnings, 100)
	log.SetOutput(io.Discard)
	log.AddHook(w)
	return log, w
}

// await waits for a warning that contains the words.
func (w warnings) await(t *testing.T, words string) {
	t.Helper()
	for late := time.After(patience); ; {
		select {
		case text := <-w:
			if strings.Contains(text, words) {
				return
			}
		case <-late:
			t.Fatalf("no warning with %q", words)
		}
	}
}

// useUpFiles leaves this process room for one descriptor, until end is called.
func useUpFiles(t *testing.T) (end func()) {
	t.Helper()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	few := before
	few.Cur = 256
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	var used []int
	for {
		fd, err := unix.Dup(0)
		if err != nil {
			break
		}
		used = append(used, fd)
	}
	unix.Close(used[0])
	used = used[1:]
	end = func() {
		closeFDs(used)
		used = nil
		unix.Setrlimit(unix.RLIMIT_NOFILE, &before)
	}
	t.Cleanup(end)
	return end
}

// TestClientBeyondTheDescriptorLimitWaits: when descriptors run out, QEMU and clients wait until
// descriptors are available again, and then are accepted even if nothing else happens.
func TestClientBeyondTheDescriptorLimitWaits(t *testing.T) {
	log, said := warningLog()
	b, served := startLoggedBackend(t, log)
	dial := func(path string) net.Conn {
		t.Helper()
		end := useUpFiles(t)
		defer end()
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conn.SetDeadline(time.Now().Add(patience))
		said.await(t, "have to wait")
		return conn
	}
	client := dial(b.cfg.UDSPath)
	client.Write([]byte("no such line\n"))
	if n, err := client.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a client that waited and said nonsense read %d, %v\nwant the end", n, err)
	}
	qemu := dial(b.cfg.Socket)
	qemu.Write(encodeRequest(reqGetFeatures, 0, nil))
	if n, err := qemu.Read(make([]byte, 64)); n == 0 || err != nil {
		t.Errorf("a front end that waited got no answer: %v", err)
	}
	if len(served) > 0 {
		t.Errorf("the service has ended: %v", <-served)
	}
}

func TestClientsLeaveDescriptorsForTheFrontEnd(t *testing.T) {
	for limit, want := range map[uint64]int{1024: 1024 - sparedFiles, 1 << 20: maxConnections, 10: 1} {
		if got := mostConnections(limit); got != want {
			t.Errorf("connections with %d descriptors\n got %d\nwant %d", limit, got, want)
		}
	}
}

func TestASecondFrontEndIsRefused(t *testing.T) {
	log, said := warningLog()
	b, _ := startLoggedBackend(t, log)
	fe := bootGuest(t, b)
	c, g := connect(t, b, fe, roomy)
	second := dialFrontEnd(t, b)
	second.conn.Write(encodeRequest(reqGetFeatures, 0, nil))
	if n, err := second.conn.Read(make([]byte, 64)); n != 0 || err == nil {
		t.Errorf("the second read %d, %v\nwant the end", n, err)
	}
	said.await(t, "refused: the first one is still connected")
	c.Write([]byte("ping"))
	if got := g.expect(opData).payload; string(got) != "ping" {
		t.Errorf("over the first came %q", got)
	}
}

// TestSilentClientIsNotAFrontEnd: this holds for any number of silent connections and however long
// they stay.
func TestSilentClientIsNotAFrontEnd(t *testing.T) {
	b, _ := startBackend(t)
	var silent []*net.UnixConn
	for range 2 * maxSilent {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: b.cfg.Socket})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(patience))
		silent = append(silent, conn)
	}
	for _, conn := range silent[:maxSilent] {
		wantEnd(t, conn, "")
	}
	for _, conn := range silent[maxSilent:] {
		stillOpen(t, "one of the last", conn)
	}
	bootGuest(t, b)
}

// clock is a clock that a test advances.
type clock struct{ atomic.Int64 }

func (c *clock) now() time.Duration { return time.Duration(c.Load()) }

// timedBackend returns a served backend with a clock of its own.
func timedBackend(t *testing.T) (*Backend, *clock) {
	t.Helper()
	dir := t.TempDir()
	b, err := Listen(Config{Socket: filepath.Join(dir, "q"), UDSPath: filepath.Join(dir, "c"), GuestCID: testCID, Log: failingLog(t)})
	if err != nil {
		t.Fatal(err)
	}
	c := &clock{}
	b.clock = c.now
	go b.Serve(context.Background())
	t.Cleanup(func() { b.Close() })
	return b, c
}

// pass advances the clock and makes the backend notice: a client connects and disconnects.
func (c *clock) pass(t *testing.T, b *Backend, d time.Duration) {
	t.Helper()
	c.Add(int64(d))
	wantEnd(t, dialClient(t, b, "nonsense"), "")
}

// stillOpen fails the test if a client's connection has ended.
func stillOpen(t *testing.T, who string, c *net.UnixConn) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		if n, err := unix.Poll(fds, 0); n != 0 || err != nil {
			t.Errorf("%s lost its connection: %#x, %v", who, fds[0].Revents, err)
		}
	})
}

func TestClientThatWaitsTooLongLosesItsSlot(t *testing.T) {
	b, clock := timedBackend(t)
	fe := bootGuest(t, b)
	mute, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: b.cfg.UDSPath})
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	idle, h := connect(t, b, fe, roomy)
	starved, g := connect(t, b, fe, 1000)
	starved.Write(make([]byte, 5000))
	for got := 0; got < 1000; {
		got += len(g.expect(opData).payload)
	}
	g.expect(opCreditRequest)
	unanswered := dialClient(t, b, "9")
	fe.expect(opRequest)

	clock.pass(t, b, sweepInterval)
	clock.pass(t, b, slotLimit-sweepInterval-1)
	for who, c := range map[string]*net.UnixConn{"the mute": mute, "the starved": starved, "the unanswered": unanswered, "the idle": idle} {
		stillOpen(t, who, c)
	}
	clock.pass(t, b, 2*sweepInterval)
	wantEnd(t, mute, "")
	wantEnd(t, unanswered, "")
	if n, err := starved.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("the starved read %d, %v\nwant the end", n, err)
	}
	resets := map[uint32]bool{}
	for range 2 {
		resets[fe.expect(opReset).dstPort] = true
	}
	if !resets[9] || !resets[g.guestPort] {
		t.Errorf("resets for guest ports\n got %v\nwant %d and 9", resets, g.guestPort)
	}
	clock.pass(t, b, 10*slotLimit)
	stillOpen(t, "the idle", idle)
	idle.Write([]byte("ping"))
	if got := h.expect(opData).payload; string(got) != "ping" {
		t.Errorf("the guest got\n got %q\nwant %q", got, "ping")
	}
}

// TestClientWithSomeProgressKeepsItsSlot: any progress counts. A client that reads slowly keeps its
// slot too, because it holds up nobody else.
func TestClientWithSomeProgressKeepsItsSlot(t *testing.T) {
	b, clock := timedBackend(t)
	fe := bootGuest(t, b)
	slow, s := connect(t, b, fe, roomy)
	s.burst()
	for fe.receive().op != opCreditUpdate {
	}
	c, g := connectPast(t, b, fe, opCreditUpdate)
	g.bufAlloc = 1
	g.send(opCreditUpdate, 0, nil)
	c.Write(make([]byte, 10))
	for range 5 {
		for fe.receive().op != opData {
		}
		clock.pass(t, b, slotLimit-sweepInterval)
		g.fwdCnt++
		g.send(opCreditUpdate, 0, nil)
	}
	stillOpen(t, "who gets a byte now and then", c)
	stillOpen(t, "who does not read", slow)
}

// TestPausedGuestCostsNoClientItsSlot: a paused guest can take nothing.
func TestPausedGuestCostsNoClientItsSlot(t *testing.T) {
	b, clock := timedBackend(t)
	fe := bootGuest(t, b)
	c, g := connect(t, b, fe, 1000)
	c.Write(make([]byte, 5000))
	g.expect(opData)
	g.expect(opCreditRequest)
	fe.stopQueues()
	for range 3 {
		clock.pass(t, b, slotLimit)
	}
	stillOpen(t, "a paused guest's client", c)
}
