package vhostvsock

import (
	"encoding/binary"
	"testing"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// The machine of FuzzDriver: two queues of 8 descriptors and their buffers, in 4 KiB.
const (
	fuzzAt     = 0x10000
	fuzzQueue  = 8
	fuzzRing   = 256 // bytes between the two rings
	fuzzBytes  = 4 << 10
	fuzzAvail  = fuzzQueue * descSize
	fuzzUsed   = (fuzzAvail + 4 + 2*fuzzQueue + 2 + 3) &^ 3
	fuzzBuffer = 2 * fuzzRing // offset of the buffers
	fuzzSlot   = 128          // bytes of one buffer
)

// driverStep is the length of a step. The driver takes one step between two turns of the device.
// The four bytes say: how many more chains, 0 to 3, become available in each queue; whether the
// driver restarts; and which byte of the memory changes.
const driverStep = 4

// FuzzDriver plays a guest's driver that behaves arbitrarily. The fuzzer provides the whole memory,
// with rings and packets, and changes it while the device serves both queues and two clients.
// Everything in the device runs except its sockets. No bug may show, and nothing may grow beyond
// its bounds.
func FuzzDriver(f *testing.F) {
	for _, seed := range driverSeeds() {
		f.Add(seed.memory, seed.steps)
	}
	f.Fuzz(func(t *testing.T, memory, steps []byte) {
		if len(steps) > 64*driverStep || len(memory) > fuzzBytes {
			return // longer inputs are slower and show nothing more
		}
		drive(t, memory, steps)
	})
}

// drive makes a device serve a driver's memory and steps, and returns what the two clients
// received.
func drive(t *testing.T, memory, steps []byte) (told [2]string) {
	mem := alignedBytes(fuzzBytes)
	copy(mem, memory)
	b := unserved(t, failingLog(t))
	b.device.mem = sliceMemory(mem, fuzzAt)
	b.device.acked = features
	clients := [2]int{newClient(t, b, "CONNECT 1024\nhello"), newClient(t, b, "CONNECT 5\n")}
	unix.Shutdown(clients[1], unix.SHUT_WR)
	for i := range b.device.rings {
		r, at := &b.device.rings[i], uint64(fuzzAt+i*fuzzRing)
		r.num, r.addr, r.hasAddr, r.enabled = fuzzQueue, vringAddr{desc: at, avail: at + fuzzAvail, used: at + fuzzUsed}, true, true
		if err := b.device.startRing(i); err != nil {
			t.Fatal(err)
		}
	}
	for ; len(steps) >= driverStep; steps = steps[driverStep:] {
		takeDriverStep(t, b, mem, steps)
		serveTurn(t, b)
		for i, c := range clients {
			if steps[0]>>7 == 0 || i == 0 { // otherwise the second client does not read in this step
				got := make([]byte, 4096)
				n, _ := unix.Read(c, got)
				told[i] += string(got[:max(n, 0)])
			}
		}
	}
	return told
}

// failingLog returns a log that fails the test when a bug is logged.
func failingLog(t testing.TB) logrus.FieldLogger {
	log := logrus.New()
	log.SetOutput(t.Output())
	log.SetLevel(logrus.ErrorLevel)
	log.AddHook(failing{t})
	return log
}

type failing struct{ testing.TB }

func (f failing) Levels() []logrus.Level     { return []logrus.Level{logrus.ErrorLevel} }
func (f failing) Fire(e *logrus.Entry) error { f.Error(e.Message); return nil }

// newClient connects a client that has sent some bytes to the backend.
func newClient(t *testing.T, b *Backend, says string) int {
	ours, theirs := socketPair(t)
	unix.Write(theirs, []byte(says))
	b.mux.add(ours)
	return theirs
}

func takeDriverStep(t *testing.T, b *Backend, mem, step []byte) {
	mem[int(binary.LittleEndian.Uint16(step[1:]))%len(mem)] = step[3]
	for i := range b.device.rings {
		r, ring := &b.device.rings[i], mem[i*fuzzRing:]
		more := uint16(step[0] >> (2 * i) & 3)
		store16(ring, fuzzAvail+2, load16(ring, fuzzAvail+2)+more)
		if step[0]&0x10 == 0 || !r.bad {
			continue
		}
		// SET_VRING_KICK does the same after the driver has seen the error.
		r.stop(b.poll)
		r.bad, r.base = false, load16(ring, fuzzAvail+2)
		b.device.onRestart()
		if err := b.device.startRing(i); err != nil {
			t.Fatal(err)
		}
	}
}

// serveTurn runs one iteration of the loop.
func serveTurn(t *testing.T, b *Backend) {
	events, err := b.poll.wait(0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range events {
		if err := b.dispatch(&events[i]); err != nil {
			t.Fatal(err)
		}
	}
	b.turn(txQueue, b.drain)
	b.turn(rxQueue, b.supply)
	if len(b.mux.conns) > 2 || len(b.mux.ready) > 2 || len(b.mux.strays) > maxStrays {
		t.Fatalf("%d connections, %d in line, %d resets", len(b.mux.conns), len(b.mux.ready), len(b.mux.strays))
	}
	for _, c := range b.mux.conns {
		if c.pending.len() > bufAlloc {
			t.Fatalf("%d bytes are buffered, limit %d", c.pending.len(), bufAlloc)
		}
	}
}

type driverSeed struct{ memory, steps []byte }

// driverSeeds returns a correct driver that talks to both clients, and variants of it that each
// break a queue in one way.
func driverSeeds() []driverSeed {
	good := goodDriver()
	// First all receive buffers, then the transmitted packets one by one.
	steps := []byte{3, 0, 0x0f, 0, 3, 0, 0x0f, 0, 2, 0, 0x0f, 0}
	for range 8 {
		steps = append(steps, 4, 0, 0x0f, 0)
	}
	seeds := []driverSeed{{good, steps}, {nil, steps}}
	spoil := func(queue, desc int, d [4]uint64) {
		memory := append([]byte(nil), good...)
		putDesc(memory[queue*fuzzRing+desc*descSize:], d)
		seeds = append(seeds, driverSeed{memory, append(steps, 0x1f, 0, 0x0f, 0)})
	}
	for queue, flags := range map[int]uint64{rxQueue: descWrite, txQueue: 0} {
		spoil(queue, 1, [4]uint64{fuzzAt + fuzzBuffer, 44, flags | descNext, 1})               // a loop
		spoil(queue, 1, [4]uint64{fuzzAt + fuzzBuffer, 44, flags | descNext, fuzzQueue})       // beyond the queue
		spoil(queue, 1, [4]uint64{fuzzAt + fuzzBuffer, 44, flags | descNext, 1<<16 - 1})       // far beyond the queue
		spoil(queue, 1, [4]uint64{fuzzAt + fuzzBytes - 43, 44, flags, 0})                      // beyond the end of memory
		spoil(queue, 1, [4]uint64{1<<64 - 16, 44, flags, 0})                                   // an address that wraps around
		spoil(queue, 1, [4]uint64{fuzzAt, 1<<32 - 1, flags, 0})                                // the greatest length
		spoil(queue, 1, [4]uint64{fuzzAt + uint64(queue)*fuzzRing, 1024, flags, 0})            // the ring itself
		spoil(queue, 1, [4]uint64{fuzzAt + fuzzBuffer, 44, flags ^ descWrite, 0})              // the wrong direction
		spoil(queue, 1, [4]uint64{fuzzAt + fuzzBuffer, 16, flags | 4, 0})                      // an indirect table
		spoil(queue, 1, [4]uint64{fuzzAt + fuzzBuffer, 0, flags, 0})                           // length 0
		spoil(queue, 1, [4]uint64{fuzzAt + fuzzBuffer, packetHeaderSize, flags | descNext, 2}) // continues with the neighbour's descriptor
	}
	return seeds
}

func putDesc(b []byte, d [4]uint64) {
	binary.LittleEndian.PutUint64(b, d[0])
	binary.LittleEndian.PutUint32(b[8:], uint32(d[1]))
	binary.LittleEndian.PutUint16(b[12:], uint16(d[2]))
	binary.LittleEndian.PutUint16(b[14:], uint16(d[3]))
}

// goodDriver returns the memory of a driver with eight receive buffers and eight packets to send:
// it accepts both clients, sends some bytes, and closes.
func goodDriver() []byte {
	mem := make([]byte, fuzzBytes)
	packets := []packetHeader{
		{dstPort: firstHostPort, srcPort: 1024, op: opResponse},
		{dstPort: firstHostPort, srcPort: 1024, op: opData, length: 50},
		{dstPort: firstHostPort + 1, srcPort: 5, op: opResponse},
		{dstPort: firstHostPort, srcPort: 1024, op: opCreditRequest},
		{dstPort: firstHostPort + 1, srcPort: 5, op: opData, length: 80},
		{dstPort: 7, srcPort: 9, op: opRequest},
		{dstPort: firstHostPort, srcPort: 1024, op: opShutdown, flags: shutdownBoth},
		{dstPort: firstHostPort + 1, srcPort: 5, op: opReset},
	}
	for i, h := range packets {
		rx, tx := fuzzBuffer+fuzzSlot*i, fuzzBuffer+fuzzSlot*(fuzzQueue+i)
		putDesc(mem[i*descSize:], [4]uint64{uint64(fuzzAt + rx), fuzzSlot, descWrite, 0})
		putDesc(mem[fuzzRing+i*descSize:], [4]uint64{uint64(fuzzAt + tx), packetHeaderSize + uint64(h.length), 0, 0})
		for queue := range queueCount {
			binary.LittleEndian.PutUint16(mem[queue*fuzzRing+fuzzAvail+4+2*i:], uint16(i))
		}
		h.srcCID, h.dstCID, h.typ, h.bufAlloc = testCID, hostCID, typeStream, 1<<16
		h.encode((*[packetHeaderSize]byte)(mem[tx:]))
	}
	return mem
}

// TestGoodDriverTalksToBothClients checks that FuzzDriver's seeds reach the states from which the
// fuzzer should continue.
func TestGoodDriverTalksToBothClients(t *testing.T) {
	seed := driverSeeds()[0]
	told := drive(t, seed.memory, seed.steps)
	want := [2]string{"OK 1073741824\n" + string(make([]byte, 50)), "OK 1073741825\n" + string(make([]byte, 80))}
	if told != want {
		t.Errorf("the clients' answers\n got %q\nwant %q", told, want)
	}
}
