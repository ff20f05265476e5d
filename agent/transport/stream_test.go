package transport

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/protocols/address"
)

// streams listens for streams, with no more than most open, and returns the channel of accepted
// ones.
func streams(t *testing.T, most int) (path string, accepted <-chan net.Conn) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "stream.sock")
	log := logrus.New()
	log.SetOutput(io.Discard)
	l, err := ListenStreams(address.Address{Scheme: address.Unix, Path: path}, most, logrus.NewEntry(log))
	if err != nil {
		t.Fatal(err)
	}
	conns := make(chan net.Conn, most)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conns <- conn
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-over
	})
	return path, conns
}

func dialStream(t *testing.T, path string) net.Conn {
	t.Helper()
	conn, err := net.Dial("unix", path)
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(limit))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestStreamsAreNoMoreThanTheirListenerAdmits(t *testing.T) {
	path, accepted := streams(t, 2)
	dialStream(t, path)
	dialStream(t, path)
	first, second := <-accepted, <-accepted
	if n, err := dialStream(t, path).Read(make([]byte, 1)); err == nil {
		t.Errorf("the third\nwant it closed\ngot  %d bytes", n)
	}
	first.Close()
	first.Close() // must count once only
	conn := dialStream(t, path)
	third := <-accepted
	if n, err := dialStream(t, path).Read(make([]byte, 1)); err == nil {
		t.Errorf("one more beside two\nwant it closed\ngot  %d bytes", n)
	}
	if _, err := io.WriteString(third, "x"); err != nil {
		t.Error(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		t.Error(err)
	}
	second.Close()
	third.Close()
}

func TestStreamObeysDeadlinesAndCloseWakesItsReader(t *testing.T) {
	path, accepted := streams(t, 1)
	dialStream(t, path)
	stream := <-accepted
	if err := stream.SetReadDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("want its deadline\ngot  %v", err)
	}
	if err := stream.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		_, err := stream.Read(make([]byte, 1))
		read <- err
	}()
	stream.Close()
	if err := <-read; !errors.Is(err, os.ErrClosed) {
		t.Errorf("want it closed\ngot  %v", err)
	}
}
