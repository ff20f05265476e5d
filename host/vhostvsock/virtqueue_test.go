package vhostvsock

import (
	"encoding/binary"
	"testing"
	"unsafe"
)

// sliceMemory returns a guest memory of one region over b, at the same addresses for the guest and
// for the front end.
func sliceMemory(b []byte, at uint64) *memory {
	s := regionSpec{guestAddr: at, userAddr: at, size: uint64(len(b))}
	return &memory{regions: []region{{regionSpec: s, data: b}}}
}

// alignedBytes returns n bytes whose beginning is aligned like a page, as far as rings need it.
func alignedBytes(n int) []byte {
	words := make([]uint64, (n+31)/8)
	b := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), len(words)*8)
	for uintptr(unsafe.Pointer(&b[0]))%16 != 0 {
		b = b[8:]
	}
	return b[:n:n]
}

func TestWords16AreIndependent(t *testing.T) {
	b := alignedBytes(8)
	for off := 0; off < 8; off += 2 {
		store16(b, off, uint16(0x1111*(off+1)))
	}
	for off := 0; off < 8; off += 2 {
		want := uint16(0x1111 * (off + 1))
		if got := load16(b, off); got != want || binary.LittleEndian.Uint16(b[off:]) != want {
			t.Errorf("u16 at %d\n got %#x\nwant %#x", off, got, want)
		}
	}
}

// TestSignalsFollowTheUsedEvent checks wantsSignal against virtio 1.2, section 2.7.7.2: a signal is
// due when the entry named by used_event was completed.
func TestSignalsFollowTheUsedEvent(t *testing.T) {
	for _, c := range []struct {
		from, to, event uint16
		want            bool
	}{
		{0, 1, 0, true},
		{0, 1, 1, false},
		{5, 8, 4, false},
		{5, 8, 5, true},
		{5, 8, 7, true},
		{5, 8, 8, false},
		{65534, 2, 65535, true},
		{65534, 2, 1, true},
		{65534, 2, 2, false},
		{65534, 2, 65533, false},
	} {
		q := testQueue(t, alignedBytes(4096), 8, 0)
		q.everConsidered, q.signalled, q.nextUsed = true, c.from, c.to
		store16(q.avail, 4+2*8, c.event)
		if got := q.wantsSignal(); got != c.want {
			t.Errorf("used %d to %d, event %d\n got %t\nwant %t", c.from, c.to, c.event, got, c.want)
		}
		if q.wantsSignal() {
			t.Errorf("used %d to %d: signalled twice", c.from, c.to)
		}
	}
}

func TestSignalsWithoutEventIndexFollowTheFlag(t *testing.T) {
	q := testQueue(t, alignedBytes(4096), 8, 0)
	q.eventIdx = false
	for i, suppressed := range []bool{false, true, false} {
		q.nextUsed++
		store16(q.avail, 0, 0)
		if suppressed {
			store16(q.avail, 0, availNoSignal)
		}
		if got, want := q.wantsSignal(), !suppressed; got != want {
			t.Errorf("completion %d\n got %t\nwant %t", i, got, want)
		}
	}
}

// testQueue makes a ring at the beginning of b.
func testQueue(t testing.TB, b []byte, size uint32, base uint16) *virtqueue {
	t.Helper()
	const at = 0x10000
	n := uint64(size)
	addr := vringAddr{desc: at, avail: at + descSize*n, used: at + descSize*n + (4+2*n+2+3)&^3}
	q, err := newVirtqueue(sliceMemory(b, at), size, addr, base, true)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func TestIndexesWrap(t *testing.T) {
	b := alignedBytes(4096)
	q := testQueue(t, b, 4, 65534)
	binary.LittleEndian.PutUint64(q.desc, 0x10000+2048)
	binary.LittleEndian.PutUint32(q.desc[8:], 16)
	q.nextUsed = 65534
	for i := range uint16(6) {
		store16(q.avail, 2, 65534+i+1)
		chain, err := q.next(false)
		if err != nil || chain.size() != 16 {
			t.Fatalf("entry %d: %d bytes, %v", i, chain.size(), err)
		}
		q.complete(0)
		if got, want := load16(q.used, 2), 65534+i+1; got != want {
			t.Errorf("used index\n got %d\nwant %d", got, want)
		}
		if q.awaitKick() {
			t.Error("a chain is there that nobody made available")
		}
		if got, want := load16(q.used, 4+8*4), 65534+i+1; got != want {
			t.Errorf("avail event\n got %d\nwant %d", got, want)
		}
	}
}

func TestSegmentsAreCutWhereAsked(t *testing.T) {
	s := segments{[]byte("ab"), nil, []byte("cde"), []byte("f")}
	for skip := range 8 {
		for n := range 8 {
			want := "abcdef"[min(skip, 6):min(skip+n, 6)]
			got := make([]byte, 8)
			got = got[:s.appendRange(nil, skip, n).copyTo(got)]
			if string(got) != want {
				t.Errorf("%d bytes from %d\n got %q\nwant %q", n, skip, got, want)
			}
		}
	}
}
