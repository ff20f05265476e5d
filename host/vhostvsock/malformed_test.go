package vhostvsock

import (
	"encoding/binary"
	"io"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

func silentLog() logrus.FieldLogger {
	l := logrus.New()
	l.SetOutput(io.Discard)
	return l
}

func socketPair(t testing.TB) (ours, theirs int) {
	t.Helper()
	ours, theirs, err := pair()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(theirs) })
	return ours, theirs
}

// breakages are the ways in which a guest can break a queue.
var breakages = map[string]func(q *driverQueue){
	"head beyond the queue":     func(q *driverQueue) { q.offer(queueSize) },
	"head far beyond the queue": func(q *driverQueue) { q.offer(queueSize + 5) },
	"next far beyond the queue": func(q *driverQueue) {
		q.writeDesc(0, q.slotGuest(0), 4, q.flags()|descNext, 1<<16-1)
		q.offer(0)
	},
	"next beyond the queue": func(q *driverQueue) {
		q.writeDesc(0, q.slotGuest(0), 4, q.flags()|descNext, queueSize)
		q.offer(0)
	},
	"chain of itself": func(q *driverQueue) {
		q.writeDesc(0, q.slotGuest(0), 4, q.flags()|descNext, 0)
		q.offer(0)
	},
	"chain that loops": func(q *driverQueue) {
		q.writeDesc(0, q.slotGuest(0), 4, q.flags()|descNext, 1)
		q.writeDesc(1, q.slotGuest(0), 4, q.flags()|descNext, 0)
		q.offer(0)
	},
	"address outside memory": func(q *driverQueue) {
		q.writeDesc(0, 0, 64, q.flags(), 0)
		q.offer(0)
	},
	"address that wraps": func(q *driverQueue) {
		q.writeDesc(0, 1<<64-16, 64, q.flags(), 0)
		q.offer(0)
	},
	"length over a region's end": func(q *driverQueue) {
		q.writeDesc(0, bufferGuest+bufferBytes-63, 64, q.flags(), 0)
		q.offer(0)
	},
	"largest length": func(q *driverQueue) {
		q.writeDesc(0, q.slotGuest(0), 1<<32-1, q.flags(), 0)
		q.offer(0)
	},
	"wrong direction": func(q *driverQueue) {
		q.writeDesc(0, q.slotGuest(0), 64, q.flags()^descWrite, 0)
		q.offer(0)
	},
	"indirect table": func(q *driverQueue) {
		q.writeDesc(0, q.slotGuest(0), 64, q.flags()|4, 0)
		q.offer(0)
	},
	"avail index too far ahead": func(q *driverQueue) {
		store16(q.ring(), availAt+2, q.avail+queueSize+1)
		signal(q.kick)
	},
}

// flags returns the descriptor flags of a buffer in this queue.
func (q *driverQueue) flags() uint16 {
	if q.index == rxQueue {
		return descWrite
	}
	return 0
}

func TestMalformedRingEndsTheDeviceUntilItIsRestarted(t *testing.T) {
	for name, spoil := range breakages {
		t.Run("tx: "+name, func(t *testing.T) {
			b, fe, c, _ := connected(t)
			spoil(fe.tx)
			wantEnd(t, c, "")
			wantBrokenThenMended(t, b, fe, fe.tx)
		})
		t.Run("rx: "+name, func(t *testing.T) {
			b, _ := startBackend(t)
			fe := connectFrontEnd(t, b)
			fe.startQueues()
			c := dialClient(t, b, "1")
			spoil(fe.rx)
			wantEnd(t, c, "")
			wantBrokenThenMended(t, b, fe, fe.rx)
		})
	}
}

func TestReceiveBufferWithoutRoomForAByteIsMalformed(t *testing.T) {
	b, _ := startBackend(t)
	fe := connectFrontEnd(t, b)
	fe.startQueues()
	c := dialClient(t, b, "1")
	fe.rx.give(0, packetHeaderSize-1, 1)
	wantEnd(t, c, "")
	wantBrokenThenMended(t, b, fe, fe.rx)
}

func wantBrokenThenMended(t *testing.T, b *Backend, fe *frontEnd, broken *driverQueue) {
	t.Helper()
	if !await(broken.err, time.Now().Add(patience)) {
		t.Fatal("the error eventfd was not signalled")
	}
	wantEnd(t, dialClient(t, b, "1024"), "") // no client can be connected
	fe.restart()
	connect(t, b, fe, roomy)
}

func TestPacketWithoutWholeHeaderIsDropped(t *testing.T) {
	_, fe, c, g := connected(t)
	fe.tx.give(1, 40, 3)
	fe.tx.take()
	g.send(opData, 0, []byte("next"))
	readN(t, c, 4)
}

func TestFloodOfStraysIsBounded(t *testing.T) {
	b, _ := startBackend(t)
	fe := connectFrontEnd(t, b)
	fe.startQueues()
	for i := range uint32(2 * maxStrays) {
		fe.transmit(packetHeader{srcCID: testCID, dstCID: hostCID, srcPort: i, dstPort: 1, typ: typeStream, op: opRequest}, nil)
	}
	for i := range uint32(maxStrays) {
		fe.rx.give(0, packetHeaderSize, 64)
		if p := fe.decode(fe.rx.take()); p.op != opReset || p.dstPort != i {
			t.Fatalf("answer %d: %+v", i, p.packetHeader)
		}
	}
	// The next packet belongs to a connection, so there were no further resets.
	dialClient(t, b, "1024")
	fe.rx.give(0, packetHeaderSize, 64)
	if p := fe.decode(fe.rx.take()); p.op != opRequest {
		t.Errorf("operation\n got %d\nwant %d", p.op, opRequest)
	}
}

// unservable lists requests that a front end must not send.
var unservable = map[string]func(fe *frontEnd){
	"unknown request":         func(fe *frontEnd) { fe.post(99, flagNeedReply, nil) },
	"feature not offered":     func(fe *frontEnd) { fe.post(reqSetFeatures, flagNeedReply, uint64Reply(1<<28)) },
	"short payload":           func(fe *frontEnd) { fe.post(reqSetFeatures, flagNeedReply, []byte{1}) },
	"queue 2":                 func(fe *frontEnd) { fe.post(reqSetVringNum, flagNeedReply, vringState(2, 8)) },
	"eventfd of queue 2":      func(fe *frontEnd) { fe.post(reqSetVringCall, flagNeedReply, uint64Reply(2), fe.tx.call) },
	"eventfd missing":         func(fe *frontEnd) { fe.post(reqSetVringCall, flagNeedReply, uint64Reply(1)) },
	"kick without eventfd":    func(fe *frontEnd) { fe.post(reqSetVringKick, flagNeedReply, uint64Reply(1|vringNoFD)) },
	"kick before addresses":   func(fe *frontEnd) { fe.post(reqSetVringKick, flagNeedReply, uint64Reply(1), fe.tx.kick) },
	"base of a packed ring":   func(fe *frontEnd) { fe.post(reqSetVringBase, flagNeedReply, vringState(0, 1<<16)) },
	"enable 2":                func(fe *frontEnd) { fe.post(reqSetVringEnable, flagNeedReply, vringState(0, 2)) },
	"regions without memory":  func(fe *frontEnd) { fe.post(reqSetMemTable, flagNeedReply, encodeMemTable(regionSpec{size: 4096})) },
	"region beyond its file":  func(fe *frontEnd) { postRegion(fe, func(r *regionSpec) { r.offset = ringBytes + bufferBytes }) },
	"region that wraps":       func(fe *frontEnd) { postRegion(fe, func(r *regionSpec) { r.guestAddr = 1<<64 - 4 }) },
	"region of half words":    func(fe *frontEnd) { postRegion(fe, func(r *regionSpec) { r.size = 4094 }) },
	"region of no size":       func(fe *frontEnd) { postRegion(fe, func(r *regionSpec) { r.size = 0 }) },
	"region of all sizes":     func(fe *frontEnd) { postRegion(fe, func(r *regionSpec) { r.size, r.offset = 1<<64-4, 8 }) },
	"queue of odd size":       func(fe *frontEnd) { startOdd(fe, 24, nil) },
	"queue of no size":        func(fe *frontEnd) { startOdd(fe, 0, nil) },
	"queue of immodest size":  func(fe *frontEnd) { startOdd(fe, 2*maxQueueSize, nil) },
	"rings outside of memory": func(fe *frontEnd) { startOdd(fe, 8, func(a []byte) { binary.LittleEndian.PutUint64(a[8:], 64) }) },
	"used ring at an odd word": func(fe *frontEnd) {
		startOdd(fe, 8, func(a []byte) { binary.LittleEndian.PutUint64(a[16:], ringUser+usedAt+2) })
	},
}

// postRegion sends a memory table of one region, which is valid except for what spoil changes.
func postRegion(fe *frontEnd, spoil func(*regionSpec)) {
	r := regionSpec{size: 4096, userAddr: ringUser}
	spoil(&r)
	fe.post(reqSetMemTable, flagNeedReply, encodeMemTable(r), fe.memfd)
}

func TestUnservableRequestsAreRefusedAndEndTheService(t *testing.T) {
	for name, try := range unservable {
		t.Run(name, func(t *testing.T) {
			b, served := startBackend(t)
			fe := connectFrontEnd(t, b)
			try(fe)
			if got := refusal(fe); got == 0 {
				t.Errorf("acknowledged\n got %d\nwant not 0", got)
			}
			select {
			case err := <-served:
				if err == nil {
					t.Error("Serve returned nil, want an error")
				}
			case <-time.After(patience):
				t.Fatal("Serve has not returned")
			}
		})
	}
}

// startOdd starts the tx queue with a size and addresses that may be invalid.
func startOdd(fe *frontEnd, size uint32, spoil func(addr []byte)) {
	addr := fe.tx.addresses()
	if spoil != nil {
		spoil(addr)
	}
	fe.send(reqSetVringNum, vringState(txQueue, size))
	fe.send(reqSetVringAddr, addr)
	fe.post(reqSetVringKick, flagNeedReply, uint64Reply(txQueue), fe.tx.kick)
}

// refusal reads an acknowledgement.
func refusal(fe *frontEnd) uint64 {
	fe.t.Helper()
	b := make([]byte, messageHeaderSize+8)
	if _, err := io.ReadFull(fe.conn, b); err != nil {
		fe.t.Fatal(err)
	}
	return binary.LittleEndian.Uint64(b[messageHeaderSize:])
}

func TestConfigIsTheCID(t *testing.T) {
	b, _ := startBackend(t)
	fe := connectFrontEnd(t, b)
	ask := func(offset, size uint32) []byte {
		payload := binary.LittleEndian.AppendUint32(nil, offset)
		payload = binary.LittleEndian.AppendUint32(payload, size)
		payload = append(payload, make([]byte, 4+size)...)
		fe.post(reqGetConfig, 0, payload)
		return fe.reply(reqGetConfig)
	}
	reply := ask(0, 8)
	if len(reply) != configHeaderSize+8 {
		t.Fatalf("config reply of %d bytes", len(reply))
	}
	if got := binary.LittleEndian.Uint64(reply[configHeaderSize:]); got != testCID {
		t.Errorf("guest CID\n got %d\nwant %d", got, testCID)
	}
	for _, beyond := range [][2]uint32{{0, 9}, {8, 1}, {1<<32 - 1, 8}} {
		if got := ask(beyond[0], beyond[1]); len(got) != 0 {
			t.Errorf("config at %d, %d bytes: reply of %d bytes, want none", beyond[0], beyond[1], len(got))
		}
	}
}
