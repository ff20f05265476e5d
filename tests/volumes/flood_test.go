package volumes

import (
	"bytes"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// floodedMiB is the memory of the flooded guest, and floodBytes the part of it that a flood may
// take: an eighth. The comment of the agent's memory says what this part contains.
const (
	floodedMiB = 512
	floodBytes = floodedMiB * miB / 8
)

// restBytes is the memory that may still be missing after a flood, because threads are kept.
const restBytes = 12 * miB

// TestFloodedGuest boots a guest with little memory for clients that take as much as they can. An
// ordinary client must still be served meanwhile.
func TestFloodedGuest(t *testing.T) {
	g := vmtest.Boot(t, vm.Options{MemoryMiB: floodedMiB})
	for _, flood := range []struct {
		name string
		test func(*testing.T, *vm.Guest)
	}{
		{"frames that are not finished", unfinishedFrames},
		{"messages that are more in memory", swellingMessages},
		{"clients that never read", neverRead},
		{"calls that wait", waitingCalls},
		{"connections that are idle", idleConnections},
	} {
		if !t.Run(flood.name, func(t *testing.T) { withinMemory(t, g, flood.test) }) {
			return
		}
	}
	must(t, vmtest.PowerOff(g))
}

// withinMemory runs a flood, and checks the memory during and after the flood.
func withinMemory(t *testing.T, g *vm.Guest, flood func(*testing.T, *vm.Guest)) {
	isServed(t, g) // first, because memory for the first client is never returned
	before := available(t, g)
	least := before
	t.Run("during", func(t *testing.T) {
		flood(t, g)
		began := time.Now()
		const rounds = 20
		for range rounds {
			isServed(t, g)
			least = min(least, available(t, g))
		}
		t.Logf("an ordinary client's %d rounds took %v", rounds, time.Since(began))
	})
	t.Logf("of %d MiB: %.1f MiB taken at most", floodedMiB, float64(before-least)/miB)
	if before-least > floodBytes {
		t.Errorf("memory taken\nwant at most %d MiB\ngot  %d MiB", floodBytes/miB, (before-least)/miB)
	}
	began := time.Now()
	until(t, func() bool { return before-available(t, g) <= restBytes })
	t.Logf("given back but for %.1f MiB after %v", float64(before-available(t, g))/miB, time.Since(began))
}

// available returns the number of bytes of memory that programs in the guest can still get.
func available(t *testing.T, g *vm.Guest) int64 {
	t.Helper()
	text, err := g.Remote.ReadFile(limited(t), "/proc/meminfo")
	must(t, err)
	_, rest, _ := strings.Cut(string(text), "MemAvailable:")
	value, _, _ := strings.Cut(rest, "kB")
	n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
	must(t, err)
	return n * kiB
}

// isServed makes the calls of an ordinary client, on an existing connection and on a new one.
func isServed(t *testing.T, g *vm.Guest) {
	t.Helper()
	_, err := g.Agent().Version(limited(t))
	must(t, err)
	must(t, container(t, g, "ordinary", &agentpb.Storage{Driver: "local", MountPoint: "/run/test/ordinary"}))
	remove(t, g, "ordinary")
	w := dialWire(t, g)
	w.send(call(t, 1, agentpb.HealthServiceName, "Version", nil))
	if _, err := w.answer(); err != nil {
		t.Error(err)
	}
	w.Close()
}

// openConnections opens n connections that end with the test.
func openConnections(t *testing.T, g *vm.Guest, n int) []net.Conn {
	t.Helper()
	conns := make([]net.Conn, n)
	for i := range conns {
		until(t, func() bool { // the guest refuses those that it has no time to accept
			conn, err := g.Dial(limited(t), agentpb.Port)
			conns[i] = conn
			return err == nil
		})
		t.Cleanup(func() { conns[i].Close() })
	}
	return conns
}

// pour writes as much as each connection accepts, until the test ends or the connection does.
func pour(t *testing.T, conns []net.Conn, write func(i int, conn net.Conn) error) {
	var writers sync.WaitGroup
	for i, conn := range conns {
		writers.Go(func() {
			_ = write(i, conn) // the agent may refuse it; ends with the connection
		})
	}
	t.Cleanup(func() {
		for _, conn := range conns {
			conn.Close()
		}
		writers.Wait()
	})
}

func unfinishedFrames(t *testing.T, g *vm.Guest) {
	frame := framed(1, ttrpcframe.TypeRequest, make([]byte, frameMax))
	pour(t, openConnections(t, g, 185), func(_ int, conn net.Conn) error {
		_, err := conn.Write(frame[:len(frame)-1])
		return err
	})
}

// swellingMessages sends lists of empty elements: each takes two bytes in the message, and a
// structure when decoded.
func swellingMessages(t *testing.T, g *vm.Guest) {
	swells := call(t, 1, agentpb.AgentServiceName, "CreateContainer", bytes.Repeat([]byte{5<<3 | 2, 0}, frameMax/2-kiB))
	for range 4 {
		w := dialWire(t, g)
		w.send(swells)
		_, err := w.answer()
		refused(t, err, codes.InvalidArgument, "when they are decoded")
	}
}

// neverRead makes calls and never reads the answers.
func neverRead(t *testing.T, g *vm.Guest) {
	pour(t, openConnections(t, g, 4), func(_ int, conn net.Conn) error {
		for stream := uint32(1); ; stream += 2 {
			if _, err := conn.Write(call(t, stream, agentpb.AgentServiceName, "GetMetrics", nil)); err != nil {
				return err
			}
		}
	})
}

// waitingCalls makes calls that take long, each with a large message.
func waitingCalls(t *testing.T, g *vm.Guest) {
	pour(t, openConnections(t, g, 20), func(i int, conn net.Conn) error {
		go func() { // reads its answers
			var buffer [4 * kiB]byte
			for {
				if _, err := conn.Read(buffer[:]); err != nil {
					return
				}
			}
		}()
		request, err := (&agentpb.CreateContainerRequest{ContainerId: fmt.Sprint("waits-", i), StringUser: &agentpb.StringUser{Uid: strings.Repeat("x", miB)}, Storages: []*agentpb.Storage{
			{Driver: "blk", Source: nowhere, Fstype: "ext4", MountPoint: fmt.Sprint("/run/test/waits-", i)}}}).Marshal()
		if err != nil {
			return err
		}
		for stream := uint32(1); ; stream += 2 {
			if _, err := conn.Write(call(t, stream, agentpb.AgentServiceName, "CreateContainer", request)); err != nil {
				return err
			}
		}
	})
}

// idleConnections opens more connections than the agent allows. The connections that were used last
// must stay.
func idleConnections(t *testing.T, g *vm.Guest) {
	openConnections(t, g, 300)
}
