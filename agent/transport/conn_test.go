package transport

import (
	"io"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/frame"
)

// A filesystem may answer after its caller has gone, and with an error.
func TestHungQuickCallIsDeclinedAfterItsPeerLeft(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	release, closed := make(chan struct{}), make(chan struct{})
	decline := func(*frame.Request) ([]byte, bool) {
		<-release
		return nil, false
	}
	c := newConn(pair[0], addr{"unix", "here"}, addr{"unix", "there"}, decline, &owed{}, func() { close(closed) })
	if _, err := unix.Write(pair[1], frame.Header{StreamID: 1, Type: frame.TypeRequest}.Append(nil)); err != nil {
		t.Fatal(err)
	}
	unix.Close(pair[1])
	if up, err := io.ReadAll(c); err != nil || len(up) > 0 { // to the end, which another goroutine has read
		t.Errorf("want nothing to go up\ngot  %x, error %v", up, err)
	}
	close(release)
	c.Close()
	<-closed
}
