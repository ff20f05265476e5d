package vhostvsock

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzMessages feeds a byte stream, split into two writes, to a device as the front end's messages.
// Each message gets a memory file or eventfds if it needs them.
func FuzzMessages(f *testing.F) {
	tableOfOne := encodeMemTable(regionSpec{guestAddr: 0, size: 8192, userAddr: ringUser})
	var addr []byte
	for _, v := range []uint64{1, ringUser, ringUser + 1024, ringUser + 512, 0} {
		addr = binary.LittleEndian.AppendUint64(addr, v)
	}
	start := bytes.Join([][]byte{
		encodeRequest(reqSetMemTable, 0, tableOfOne),
		encodeRequest(reqSetVringNum, 0, vringState(txQueue, 8)),
		encodeRequest(reqSetVringAddr, 0, addr),
		encodeRequest(reqSetVringKick, 0, uint64Reply(txQueue)),
		encodeRequest(reqSetVringEnable, 0, vringState(txQueue, 1)),
	}, nil)
	f.Add(start, 20)
	f.Add(append(start, encodeRequest(reqGetVringBase, 0, vringState(txQueue, 0))...), 300)
	f.Add(append(start, encodeRequest(reqSetMemTable, flagNeedReply, encodeMemTable())...), 0)
	f.Add(encodeRequest(reqGetFeatures, 0, nil), 3)
	f.Add(encodeRequest(reqSetFeatures, flagNeedReply, uint64Reply(features)), 0)
	f.Add(encodeRequest(reqGetConfig, 0, make([]byte, 20)), 0)
	f.Add(encodeRequest(reqSetVringCall, 0, uint64Reply(vringNoFD)), 0)
	f.Fuzz(func(t *testing.T, stream []byte, cut int) {
		if len(stream) > 16<<10 {
			return
		}
		p, err := newPoller()
		if err != nil {
			t.Fatal(err)
		}
		defer p.close()
		d := newDevice(p, testCID, func() {})
		defer d.close()
		ours, theirs := socketPair(t)
		defer unix.Close(ours)
		var r messageReader
		defer r.close()
		cut = max(0, min(cut, len(stream)))
		for _, part := range [][]byte{stream[:cut], stream[cut:]} {
			unix.Write(theirs, part)
			if !serveMessages(t, &r, d, ours) {
				return
			}
		}
	})
}

// serveMessages handles the messages that have arrived, and reports whether the device continues.
func serveMessages(t *testing.T, r *messageReader, d *device, fd int) bool {
	for {
		m, err := r.read(fd)
		if m == nil || err != nil {
			return err == nil
		}
		switch m.request { // a fuzzer cannot send descriptors over a socket, so they are added here
		case reqSetMemTable:
			m.fds = make([]int, min(maxRegions, len(m.payload)/regionSpecSize))
			for i := range m.fds {
				m.fds[i] = memfd(t, 16<<10)
			}
		case reqSetVringKick, reqSetVringCall, reqSetVringErr:
			e, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
			if err != nil {
				t.Fatal(err)
			}
			m.fds = []int{e}
		}
		if _, err := d.handle(m); err != nil {
			return false
		}
		for i := range d.rings {
			if q := d.rings[i].served(); q != nil {
				exercise(t, q, i == rxQueue)
			}
		}
	}
}

func memfd(t testing.TB, size int64) int {
	fd, err := unix.MemfdCreate("guest", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, size)
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// exercise takes and completes twice as many chains as a queue can hold.
func exercise(t *testing.T, q *virtqueue, writable bool) {
	for range 2 * int(q.size) {
		chain, err := q.next(writable)
		if err != nil {
			return
		}
		if chain == nil {
			q.awaitKick()
			return
		}
		if len(chain) > int(q.size) {
			t.Fatalf("a chain of %d descriptors in a queue of %d", len(chain), q.size)
		}
		for _, b := range chain {
			if len(b) > 0 && writable {
				b[0]++
				b[len(b)-1]++
			}
		}
		q.complete(chain.size())
		q.wantsSignal()
	}
}

// FuzzDescriptorChains tests a queue of 8 in a memory that the fuzzer provides completely: 128
// bytes of descriptors, the avail ring, the used ring, and further bytes.
func FuzzDescriptorChains(f *testing.F) {
	seed := func(avail uint16, descs ...[4]uint64) []byte {
		var b []byte
		for _, d := range descs {
			b = binary.LittleEndian.AppendUint64(b, d[0])
			b = binary.LittleEndian.AppendUint32(b, uint32(d[1]))
			b = binary.LittleEndian.AppendUint16(b, uint16(d[2]))
			b = binary.LittleEndian.AppendUint16(b, uint16(d[3]))
		}
		b = append(b, make([]byte, 128-len(b))...)
		return binary.LittleEndian.AppendUint32(b, uint32(avail)<<16)
	}
	const at = 0x10000
	f.Add(seed(1, [4]uint64{at + 300, 44, descNext, 1}, [4]uint64{at + 400, 64, 0, 0}), false)
	f.Add(seed(8, [4]uint64{at + 300, 44, descWrite, 0}), true)
	f.Add(seed(1, [4]uint64{at + 300, 1, descNext, 0}), false)
	f.Add(seed(1, [4]uint64{at, 1 << 31, descWrite, 0}), true)
	f.Add(seed(9), true)
	f.Add(seed(2, [4]uint64{at, 256, descWrite, 0}), true) // a buffer that overlaps the ring itself
	f.Fuzz(func(t *testing.T, data []byte, writable bool) {
		b := alignedBytes(1024)
		copy(b, data)
		exercise(t, testQueue(t, b, 8, 0), writable)
	})
}

func FuzzPacketHeader(f *testing.F) {
	h := packetHeader{srcCID: 3, dstCID: 2, srcPort: 4, dstPort: 5, length: 6, typ: 1, op: 5, flags: 7, bufAlloc: 8, fwdCnt: 9}
	var b [packetHeaderSize]byte
	h.encode(&b)
	f.Add(b[:])
	f.Add(bytes.Repeat([]byte{0xff}, packetHeaderSize))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) < packetHeaderSize {
			return
		}
		h := decodePacketHeader((*[packetHeaderSize]byte)(data))
		var back [packetHeaderSize]byte
		h.encode(&back)
		if !bytes.Equal(back[:], data[:packetHeaderSize]) {
			t.Errorf("encoded again\n got %x\nwant %x", back, data[:packetHeaderSize])
		}
	})
}

// FuzzGuestPackets makes the guest send arbitrary packets while one client is connected, and checks
// that nothing grows beyond its bounds.
func FuzzGuestPackets(f *testing.F) {
	one := func(op operation, flags uint32, payload int) []byte {
		return []byte{byte(op), byte(flags), byte(payload >> 8), byte(payload)}
	}
	f.Add(one(opResponse, 0, 0))
	f.Add(bytes.Join([][]byte{one(opResponse, 0, 0), one(opData, 0, 3000), one(opShutdown, 3, 0)}, nil))
	f.Add(bytes.Join([][]byte{one(opResponse, 0, 0), bytes.Repeat(one(opData, 0, 65535), 12)}, nil))
	f.Add(bytes.Join([][]byte{one(opResponse, 0, 0), one(opShutdown, 2, 0), one(opCreditRequest, 0, 0), one(opReset, 0, 0)}, nil))
	f.Add(bytes.Repeat(one(opRequest, 128, 0), 400))
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 2048 {
			return // longer inputs are slower and show nothing more
		}
		p, err := newPoller()
		if err != nil {
			t.Fatal(err)
		}
		defer p.close()
		m := newMux(p, testCID, silentLog())
		defer m.close()
		ours, theirs := socketPair(t)
		unix.Write(theirs, []byte("CONNECT 1024\nhello"))
		m.add(ours)
		m.clientEvent(firstHostPort, unix.EPOLLIN)
		room := segments{make([]byte, 20), make([]byte, 100)}
		for ; len(script) >= 4; script = script[4:] {
			m.receive(scripted(script))
			if c := m.conns[firstHostPort]; c != nil && c.pending.len() > bufAlloc {
				t.Fatalf("%d bytes are buffered, limit %d", c.pending.len(), bufAlloc)
			}
			if len(m.strays) > maxStrays || len(m.ready) > 1 || len(m.conns) > 1 {
				t.Fatalf("%d resets, %d in line, %d connections", len(m.strays), len(m.ready), len(m.conns))
			}
			if script[1]&64 != 0 {
				continue // this time there is no receive buffer
			}
			if n := m.fill(room); n != 0 && n < packetHeaderSize {
				t.Fatalf("a packet of %d bytes", n)
			}
		}
	})
}

// scripted makes a packet from four bytes: the operation; the flags, in which 16 and 32 make the
// length and the type wrong, and 128 the port; and the payload's length.
func scripted(s []byte) segments {
	n := int(s[2])<<8 | int(s[3])
	h := packetHeader{
		srcCID: testCID, dstCID: hostCID, srcPort: 1024, dstPort: firstHostPort, typ: typeStream,
		op: operation(s[0]), flags: uint32(s[1]) & 3, length: uint32(n), bufAlloc: 1 << 16, fwdCnt: uint32(s[3]),
	}
	if s[1]&16 != 0 {
		h.length += 70_000
	}
	if s[1]&32 != 0 {
		h.typ = 2
	}
	if s[1]&128 != 0 {
		h.dstPort++
	}
	var b [packetHeaderSize]byte
	h.encode(&b)
	return segments{b[:10], b[10:], make([]byte, n)}
}

func FuzzConnectLine(f *testing.F) {
	for _, s := range []string{"CONNECT 1024\n", "CONNECT 1024", "CONNECT \n", "CONNECT 4294967295\n", "connect 1\n", "CONNECT 1\r\n", "\n", "CONNECT +1\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		port, n, err := parseConnect(data)
		if errors.Is(err, errNoLine) {
			if len(data) >= maxConnectLine || bytes.IndexByte(data, '\n') >= 0 {
				t.Errorf("%q: more was wanted", data)
			}
			return
		}
		if err != nil {
			return
		}
		if n > len(data) || data[n-1] != '\n' || port == anyPort {
			t.Errorf("%q: port %d, line of %d bytes", data, port, n)
		}
		if got := bytes.TrimLeft(data[len(connectWord):n-1], "0"); string(got) != itoa(port) && port != 0 {
			t.Errorf("%q: port %d", data, port)
		}
	})
}
