package volumes

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// Many connections are used at once, each with more data in flight than its credit allows before
// the other side has read.
func TestConnectionsAtOnceKeepTheirBytes(t *testing.T) {
	g := guest(t)
	const connections, length = 50, 512 * kiB
	var all sync.WaitGroup
	for n := range connections {
		conn := dialPort(t, g, remote.EchoPort)
		must(t, conn.SetDeadline(time.Now().Add(vm.Limit(jobLimit))))
		all.Go(func() {
			if err := echo(conn, uint64(n), length); err != nil {
				t.Errorf("connection %d: %v", n, err)
			}
		})
	}
	all.Wait()
}

// echo sends bytes made from a seed over a connection and compares the returned bytes.
func echo(conn net.Conn, seed uint64, length int) error {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	want := make([]byte, length)
	_, _ = rand.NewChaCha8(key).Read(want)
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(want)
		sent <- err
	}()
	got := make([]byte, length)
	if _, err := io.ReadFull(conn, got); err != nil {
		return err
	}
	if err := <-sent; err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("other bytes came back")
	}
	return nil
}

// A client that sends and does not read stalls only itself.
func TestClientThatDoesNotReadStallsNobody(t *testing.T) {
	g := guest(t)
	undisturbed(t, g)
	stuck := dialPort(t, g, remote.EchoPort)
	must(t, stuck.SetWriteDeadline(time.Now().Add(time.Second)))
	if n, err := io.Copy(stuck, rand.NewChaCha8([32]byte{})); err == nil {
		t.Errorf("%d bytes went out and nobody read them", n)
	}
	conn := dialPort(t, g, remote.EchoPort)
	must(t, conn.SetDeadline(time.Now().Add(vm.Limit(callLimit))))
	must(t, echo(conn, 1, miB))
}
