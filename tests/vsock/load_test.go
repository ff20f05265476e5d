package vsock

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// The loads of `make test`; the heavy loads are in load_long_test.go.

func TestHundredConnectionsAtOnce(t *testing.T) { connectionsAtOnce(t, 100) }

func TestThousandConnectionsOpenedAndClosedLeaveNothing(t *testing.T) { openedAndClosed(t, 1000) }

func TestBulkEachWayIsIntact(t *testing.T) { bulkEachWay(t, 64) }

func TestSlowReadersStallOnlyThemselves(t *testing.T) { slowReaders(t, 8) }

// connectionsAtOnce opens connections, uses all of them, and closes them.
func connectionsAtOnce(t *testing.T, n int) {
	g := shared.Guest(t)
	b, ctx := backendOf(t, g), vmtest.Within(t, vmtest.JobLimit)
	before := b.openFiles(t)
	var conns []net.Conn
	for range n {
		conn, err := g.Remote.Echo(ctx)
		vmtest.Must(t, err)
		t.Cleanup(func() { conn.Close() })
		conns = append(conns, conn)
	}
	if got := b.openFiles(t); got != before+n {
		t.Errorf("open files of the backend\nwant %d\ngot  %d", before+n, got)
	}
	for i, conn := range conns { // every connection is written to before the first is read from
		_, err := conn.Write(binary.BigEndian.AppendUint64(nil, uint64(i)))
		vmtest.Must(t, err)
	}
	for i, conn := range slices.Backward(conns) {
		got := make([]byte, 8)
		_, err := io.ReadFull(conn, got)
		vmtest.Must(t, err)
		if got := binary.BigEndian.Uint64(got); got != uint64(i) {
			t.Errorf("connection %d\nwant its number back\ngot  %d", i, got)
		}
	}
	vmtest.Must(t, g.Agent().Check(ctx))
	for _, conn := range conns {
		conn.Close()
	}
	b.awaitFiles(t, ctx, before)
}

// openedAndClosed opens and closes connections, a few at a time, in every way that a client can,
// and checks that the backend is as it was before.
func openedAndClosed(t *testing.T, n int) {
	g := shared.Guest(t)
	b, ctx := backendOf(t, g), vmtest.Within(t, vmtest.JobLimit)
	files := b.openFiles(t)
	vmtest.Must(t, useOnce(ctx, g, 0))
	b.awaitFiles(t, ctx, files)
	memory, threads := b.status(t, "RssAnon"), b.status(t, "Threads")
	var next atomic.Int64
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() {
			for i := next.Add(1); i <= int64(n); i = next.Add(1) {
				if err := useOnce(ctx, g, int(i)); err != nil {
					t.Errorf("connection %d: %v", i, err)
					return
				}
			}
		})
	}
	workers.Wait()
	b.awaitFiles(t, ctx, files)
	t.Logf("the backend's RssAnon: %d KiB before, %d after; threads: %d, %d", memory, b.status(t, "RssAnon"), threads, b.status(t, "Threads"))
	if got, limit := b.status(t, "RssAnon"), memory+16*kiB; got > limit {
		t.Errorf("RssAnon of the backend, in KiB\nwant at most %d\ngot  %d", limit, got)
	}
}

// useOnce makes a connection and ends it in the way that i selects.
func useOnce(ctx context.Context, g *vm.Guest, i int) error {
	if i%4 == 3 {
		return refused(ctx, g)
	}
	conn, err := g.Remote.Echo(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if i%4 == 0 {
		return nil // without sending anything
	}
	want := fmt.Sprint("connection ", i)
	if _, err := io.WriteString(conn, want); err != nil || i%4 == 1 {
		return err // without reading the answer
	}
	if err := closeWrite(conn); err != nil {
		return err
	}
	got, err := io.ReadAll(conn)
	if err == nil && string(got) != want {
		err = fmt.Errorf("the echo is %q, want %q", got, want)
	}
	return err
}

// refused connects to a port on which nobody listens.
func refused(ctx context.Context, g *vm.Guest) error {
	conn, err := g.Dial(ctx, 9)
	if err == nil {
		conn.Close()
		return errors.New("somebody listens on port 9")
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return nil
}

// bulkEachWay sends blocks to the guest, which sends them back, ends with a half-close, and
// compares every byte.
func bulkEachWay(t *testing.T, blocks int) {
	g := shared.Guest(t)
	ctx := vmtest.Within(t, vmtest.JobLimit)
	conn, err := g.Remote.Echo(ctx)
	vmtest.Must(t, err)
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	sent := make(chan error, 1)
	go func() { sent <- sendBlocks(conn, blocks) }()
	vmtest.Must(t, receiveBlocks(conn, blocks))
	vmtest.Must(t, <-sent)
	if n, err := conn.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("after the half-close came back\nwant the end\ngot  %d bytes, %v", n, err)
	}
	vmtest.Must(t, g.Agent().Check(ctx))
}

// sendBlocks sends numbered blocks of 1 MiB, and then closes the sending side.
func sendBlocks(conn net.Conn, blocks int) error {
	block := make([]byte, miB)
	for i := range blocks {
		remote.Fill(block, 0, uint64(i))
		if _, err := conn.Write(block); err != nil {
			return fmt.Errorf("send block %d: %w", i, err)
		}
	}
	return closeWrite(conn)
}

// receiveBlocks receives and checks the blocks of sendBlocks.
func receiveBlocks(conn net.Conn, blocks int) error {
	got, want := make([]byte, miB), make([]byte, miB)
	for i := range blocks {
		if _, err := io.ReadFull(conn, got); err != nil {
			return fmt.Errorf("receive block %d: %w", i, err)
		}
		if remote.Fill(want, 0, uint64(i)); string(got) != string(want) {
			return fmt.Errorf("block %d came back otherwise", i)
		}
	}
	return nil
}

// closeWrite closes the direction to the guest.
func closeWrite(conn net.Conn) error {
	return conn.(interface{ CloseWrite() error }).CloseWrite()
}

// slowReaders makes clients send and never read, until all buffers of echo, guest and backend are
// full for them, and checks that other clients are not affected.
func slowReaders(t *testing.T, n int) {
	const blocks = 4 // more than all buffers on both ways can hold
	g := shared.Guest(t)
	ctx := vmtest.Within(t, vmtest.JobLimit)
	var conns []net.Conn
	results := make(chan error, n)
	var progress counter
	for range n {
		conn, err := g.Remote.Echo(ctx)
		vmtest.Must(t, err)
		defer conn.Close()
		defer context.AfterFunc(ctx, func() { conn.Close() })()
		conns = append(conns, conn)
		go func() { results <- sendBlocks(counted{conn, &progress}, blocks) }()
	}
	// The clients are stuck when none of them makes progress while others do.
	quick, err := g.Remote.Echo(ctx)
	vmtest.Must(t, err)
	defer quick.Close()
	for still, last := 0, int64(-1); still < 100; {
		vmtest.Must(t, pingPong(quick))
		vmtest.Must(t, g.Agent().Check(ctx))
		if now := progress.Load(); now != last {
			still, last = 0, now
		} else {
			still++
		}
	}
	if len(results) > 0 {
		t.Fatalf("a client that does not read has sent everything: %v", <-results)
	}
	for _, conn := range conns {
		vmtest.Must(t, receiveBlocks(conn, blocks))
	}
	for range conns {
		vmtest.Must(t, <-results)
	}
}

func pingPong(conn net.Conn) error {
	if _, err := io.WriteString(conn, "ping"); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, make([]byte, 4))
	return err
}

type counter = atomic.Int64

// counted is a connection that counts the bytes sent to the guest.
type counted struct {
	net.Conn
	sent *counter
}

func (c counted) Write(p []byte) (total int, err error) {
	for len(p) > 0 {
		n, err := c.Conn.Write(p[:min(len(p), 4*kiB)])
		c.sent.Add(int64(n))
		total += n
		if err != nil {
			return total, err
		}
		p = p[n:]
	}
	return total, nil
}

// CloseWrite closes the direction to the guest.
func (c counted) CloseWrite() error { return closeWrite(c.Conn) }
