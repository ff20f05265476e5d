package vhostvsock

import (
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
	"github.com/sirupsen/logrus/hooks/test"
	"golang.org/x/sys/unix"
)

// TestMemoryThatIsTakenAwayBreaksOnlyTheQueue: an access that would be a SIGBUS elsewhere only
// breaks the guest's queue here.
func TestMemoryThatIsTakenAwayBreaksOnlyTheQueue(t *testing.T) {
	log, hook := test.NewNullLogger()
	b, _ := startLoggedBackend(t, log)
	fe := bootGuest(t, b)
	c, _ := connect(t, b, fe, roomy)
	if err := unix.Ftruncate(fe.memfd, ringBytes); err != nil {
		t.Fatal(err)
	}
	fe.tx.give(0, packetHeaderSize, 64)
	wantEnd(t, c, "")
	if err := unix.Ftruncate(fe.memfd, ringBytes+bufferBytes); err != nil {
		t.Fatal(err)
	}
	wantBrokenThenMended(t, b, fe, fe.tx)
	wantReport(t, hook, "segments.go")
}

// unserved returns a backend whose loop the test runs itself.
func unserved(t testing.TB, log logrus.FieldLogger) *Backend {
	t.Helper()
	p, err := newPoller()
	if err != nil {
		t.Fatal(err)
	}
	m := newMux(p, testCID, log)
	b := &Backend{log: log, poll: p, wake: -1, frontEnd: -1, mux: m, device: newDevice(p, testCID, m.guestRestarted)}
	t.Cleanup(func() {
		m.close()
		b.device.close()
		p.close()
	})
	return b
}

func TestPanicOverAGuestsBytesBreaksOnlyTheQueue(t *testing.T) {
	log, hook := test.NewNullLogger()
	for index, name := range map[int]string{rxQueue: "rx", txQueue: "tx"} {
		b := unserved(t, log)
		ours, theirs := socketPair(t)
		unix.Write(theirs, []byte("CONNECT 1024\n"))
		b.mux.add(ours)
		b.clientEvent(firstHostPort, unix.EPOLLIN)
		q := testQueue(t, alignedBytes(4096), 8, 0)
		q.avail = q.avail[:2:2] // a stand-in for any bug: a slice that is too short
		r := &b.device.rings[index]
		r.queue, r.enabled = q, true
		b.turn(index, map[int]func() error{rxQueue: b.supply, txQueue: b.drain}[index])
		if !r.bad {
			t.Errorf("%s: the queue is served on", name)
		}
		if n, err := unix.Read(theirs, make([]byte, 1)); n != 0 || err != nil {
			t.Errorf("%s: the client of the broken queue read %d, %v; want the end", name, n, err)
		}
		wantReport(t, hook, "survive_test.go")
	}
}

func TestPanicOverAClientsBytesEndsOnlyThatClient(t *testing.T) {
	log, hook := test.NewNullLogger()
	b := unserved(t, log)
	bad, victim := socketPair(t)
	good, bystander := socketPair(t)
	b.mux.add(bad)
	b.mux.add(good)
	unix.Write(victim, []byte("nonsense\n"))
	unix.Write(bystander, []byte("CONNECT 1\n"))
	b.mux.log = nil // a stand-in for any bug
	b.clientEvent(firstHostPort, unix.EPOLLIN)
	b.mux.log = log
	b.clientEvent(firstHostPort+1, unix.EPOLLIN)
	if n, err := unix.Read(victim, make([]byte, 1)); n > 0 || err != nil && err != unix.ECONNRESET {
		t.Errorf("the client read %d, %v; want the end", n, err)
	}
	if c := b.mux.conns[firstHostPort+1]; c == nil || c.state != connecting {
		t.Errorf("the other client's connection\n got %+v\nwant it connecting", c)
	}
	wantReport(t, hook, "survive_test.go")
}

func TestPanicOverAMessageIsAnError(t *testing.T) {
	log, hook := test.NewNullLogger()
	b := unserved(t, log)
	ours, theirs := socketPair(t)
	b.frontEnd, b.device = ours, nil // a stand-in for any bug
	defer unix.Close(ours)
	unix.Write(theirs, encodeRequest(reqSetFeatures, 0, uint64Reply(0)))
	ev := unix.EpollEvent{Fd: int32(sourceFrontEnd)}
	if err := b.dispatch(&ev); err == nil || !strings.Contains(err.Error(), "a bug in directvol") {
		t.Errorf("dispatch returned\n got %v\nwant an error that says it is a bug", err)
	}
	b.device = newDevice(b.poll, testCID, func() {})
	wantReport(t, hook, "survive_test.go")
}

// wantReport expects one bug in the log, whose stack contains the file.
func wantReport(t *testing.T, hook *test.Hook, file string) {
	t.Helper()
	var reports []string
	for _, e := range hook.AllEntries() {
		if e.Level == logrus.ErrorLevel {
			reports = append(reports, e.Message)
		}
	}
	hook.Reset()
	if len(reports) != 1 || !strings.Contains(reports[0], file) {
		t.Errorf("reports of bugs\n got %q\nwant one that names %s", reports, file)
	}
}
