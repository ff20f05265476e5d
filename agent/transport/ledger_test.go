package transport

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// lending is the state of the ledger's model: the accounts with charged calls, and the waiting
// calls.
type lending struct {
	l        *ledger
	over     chan struct{}
	accounts []*account
	waits    []*loan
	stream   uint32
}

type loan struct {
	a     *account
	bytes int64
	done  chan bool
}

func (m *lending) take(t *rapid.T) {
	a := rapid.SampledFrom(m.accounts).Draw(t, "account")
	bytes := costOf(uint32(rapid.SampledFrom([]int{0, 1 << 10, 64 << 10, 1 << 20, 4 << 20, 8 << 20}).Draw(t, "length")))
	m.stream += 2
	w := &loan{a, bytes, make(chan bool, 1)}
	stream, before := m.stream, m.queued()
	go func() { w.done <- m.l.take(a, stream, bytes, m.over) }()
	for len(w.done) == 0 && m.queued() == before { // until it is either served or queued
	}
	m.waits = append(m.waits, w)
}

func (m *lending) queued() int {
	m.l.mu.Lock()
	defer m.l.mu.Unlock()
	return len(m.l.waiting)
}

func (m *lending) give(t *rapid.T) {
	a := rapid.SampledFrom(m.accounts).Draw(t, "account")
	if len(a.calls) > 0 {
		m.l.give(a, rapid.SampledFrom(a.calls).Draw(t, "call").stream)
	}
}

func (m *lending) end(t *rapid.T) {
	i := rapid.IntRange(0, len(m.accounts)-1).Draw(t, "account")
	m.l.close(m.accounts[i])
	m.accounts[i] = &account{}
	m.l.open()
}

// holds checks the sums, and that no call waits for memory that is free.
func (m *lending) holds(t *rapid.T) {
	m.l.mu.Lock()
	defer m.l.mu.Unlock()
	var lent int64
	for _, a := range m.accounts {
		var sum int64
		for _, c := range a.calls {
			sum += c.bytes
		}
		if sum != a.inUse || a.borrowed(0) > m.l.lentToOne {
			t.Fatalf("an account has %d in use, its calls %d; one may borrow %d", a.inUse, sum, m.l.lentToOne)
		}
		lent += a.borrowed(0)
	}
	if lent != m.l.lent || lent > m.l.bounds.lent {
		t.Fatalf("lent\nwant %d, of at most %d\ngot  %d", lent, m.l.bounds.lent, m.l.lent)
	}
	for _, w := range m.l.waiting {
		if w.borrowed(w.bytes) <= m.l.lentToOne && lent+w.borrowed(w.bytes)-w.borrowed(0) <= m.l.bounds.lent {
			t.Fatalf("%d bytes are waited for, which are there", w.bytes)
		}
	}
}

func TestMemoryIsLentWithinItsBoundsAndWithoutNeedlessWaits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &lending{over: make(chan struct{}), accounts: []*account{{}, {}, {}, {}}}
		m.l = &newRoom(boundsOf(rapid.SampledFrom([]int64{64 << 20, 1 << 30}).Draw(t, "memory"))).ledger
		for range m.accounts {
			m.l.open()
		}
		t.Repeat(map[string]func(*rapid.T){"take": m.take, "give": m.give, "end": m.end, "": m.holds})
		for _, a := range m.accounts {
			m.l.close(a)
		}
		close(m.over)
		for _, w := range m.waits {
			<-w.done
		}
		if m.l.lent != 0 || m.l.inUse != 0 || len(m.l.waiting) != 0 {
			t.Fatalf("left at the end: %d lent, %d in use, %d waiters", m.l.lent, m.l.inUse, len(m.l.waiting))
		}
	})
}

// Even with little memory, the largest call can be made, beside others.
func TestLargestCallIsNeverBeyondTheBounds(t *testing.T) {
	for _, memory := range []int64{0, 64 << 20, 512 << 20, 1 << 30, 64 << 30} {
		b := boundsOf(memory)
		var a account
		l := &newRoom(b).ledger
		for stream := range uint32(100) {
			if !l.take(&a, stream, costOf(100), nil) {
				t.Fatal("not taken")
			}
		}
		if b.lentToOne > b.lent || !l.take(&a, 101, costOf(4<<20), nil) {
			t.Errorf("of %d bytes: %+v", memory, b)
		}
	}
}

func TestConnectionsFollowTheMemoryBetweenTwoBounds(t *testing.T) {
	for memory, want := range map[int64]int{
		0: minConns, minConns * connBytes * 2 * share: minConns, 100 * connBytes * 2 * share: 100, 64 << 30: maxConns,
	} {
		r := newRoom(boundsOf(memory))
		for n := range want + 1 {
			c := &conn{room: r}
			c.reading.start() // it is at work, and gives way to no other
			if err := r.admit(c); (err == nil) != (n < want) {
				t.Fatalf("%d bytes, connection %d of %d: error %v", memory, n+1, want, err)
			}
		}
	}
}

// The smallest waiting request is served first: an ordinary client's call passes a flood of large
// ones.
func TestSmallestRequestForMemoryIsServedFirst(t *testing.T) {
	l := &newRoom(boundsOf(0)).ledger
	large, small := costOf(2<<20), costOf(32<<10)
	var first account
	l.take(&first, 1, large, nil)
	l.take(&first, 3, least+ownBytes-large, nil) // all the memory
	done := make(chan string)
	for i, c := range []struct {
		name  string
		bytes int64
	}{{"the large one", large + ownBytes}, {"the small one", small + ownBytes}} {
		go func() {
			l.take(&account{}, 1, c.bytes, nil)
			done <- c.name
		}()
		for n := 0; n <= i; { // until it waits
			l.mu.Lock()
			n = len(l.waiting)
			l.mu.Unlock()
		}
	}
	l.give(&first, 1) // enough for either call, but not for both
	if got := <-done; got != "the small one" {
		t.Errorf("served first: %s", got)
	}
	l.close(&first)
	<-done
}

// While a call waits for memory that others have, the ledger looks for those that are stuck.
func TestLedgerLooksForTheStuckWhileACallWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &newRoom(boundsOf(0)).ledger
		began, looks := time.Now(), []time.Duration(nil)
		l.held = func() { looks = append(looks, time.Since(began)) }
		var first, next account
		l.take(&first, 1, least+ownBytes, nil) // all the memory
		over := make(chan struct{})
		go l.take(&next, 1, least, over)
		time.Sleep(3*waitLook + waitLook/2)
		l.close(&next) // waits no more
		close(over)
		time.Sleep(3 * waitLook)
		if want := []time.Duration{waitLook, 2 * waitLook, 3 * waitLook}; !slices.Equal(looks, want) {
			t.Errorf("looks\nwant after %v\ngot  %v", want, looks)
		}
	})
}

// Each connection has memory for a few small calls, even while others have all that is lent.
func TestConnectionHasMemoryOfItsOwn(t *testing.T) {
	l := &newRoom(boundsOf(0)).ledger
	var first, next account
	l.take(&first, 1, least+48<<10, nil) // all the memory, and its own
	for _, call := range []struct {
		bytes int64
		want  bool
	}{{48<<10 + 1, false}, {48 << 10, true}, {1, false}} {
		l.mu.Lock()
		got := l.serve(&waiter{&next, charge{1, call.bytes}, make(chan struct{})})
		l.mu.Unlock()
		if got != call.want {
			t.Errorf("%d bytes beside a flood\nwant them lent: %v\ngot  %v", call.bytes, call.want, got)
		}
	}
}
