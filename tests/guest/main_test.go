package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/guest/remote"
)

func TestEchoReturnsEveryByteInOrder(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "echo.sock")
	listener, err := listenEcho(&unix.SockaddrUnix{Name: socket})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- serveEcho(listener) }()
	t.Cleanup(func() { // close(2) would not wake accept(2) up
		if err := unix.Shutdown(listener, unix.SHUT_RDWR); err != nil {
			t.Error(err)
		}
		<-ended
		unix.Close(listener)
	})
	returnsEveryByte(t, socket)
}

// bareEchoSocket is the environment variable that makes this test program a bare echo, which needs
// its own process.
const bareEchoSocket = "TEST_BARE_ECHO_SOCKET"

func TestMain(m *testing.M) {
	socket := os.Getenv(bareEchoSocket)
	if socket == "" {
		os.Exit(m.Run())
	}
	listener, err := listenEcho(&unix.SockaddrUnix{Name: socket})
	if err == nil {
		fmt.Println("listening")
		err = serveBareEcho(listener)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func TestBareEchoReturnsEveryByteOfMoreConnectionsThanItServesAtOnce(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "echo.sock")
	server := exec.Command(os.Args[0])
	server.Env = append(os.Environ(), bareEchoSocket+"="+socket)
	server.Stderr = os.Stderr
	output, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		server.Process.Kill()
		server.Wait()
	})
	if line, err := bufio.NewReader(output).ReadString('\n'); line != "listening\n" {
		t.Fatal(line, err)
	}
	for range 2 * remote.BareEchoes {
		returnsEveryByte(t, socket)
	}
}

// returnsEveryByte sends more bytes than the sockets and the echo can hold together.
func returnsEveryByte(t *testing.T, socket string) {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	want := make([]byte, 1<<20)
	_, _ = rand.Read(want)
	go func() { _, _ = conn.Write(want) }()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(conn, got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("other bytes came back")
	}
}

func TestAwaitTriesAgainAfterEachEvent(t *testing.T) {
	events, tries := 0, 0
	err := await(func() error {
		tries++
		if events < 3 {
			return unix.EAFNOSUPPORT
		}
		return nil
	}, func() error { events++; return nil })
	if err != nil || tries != 4 || events != 3 {
		t.Errorf("want: 4 tries, 3 events\n got: %d, %d, %v", tries, events, err)
	}
}

func TestAwaitGivesUpOnAnyOtherError(t *testing.T) {
	fine := func() error { return nil }
	fail := func(err error) func() error { return func() error { return err } }
	if err := await(fail(unix.EACCES), fine); !errors.Is(err, unix.EACCES) {
		t.Errorf("try\nwant: %v\n got: %v", unix.EACCES, err)
	}
	if err := await(fail(unix.EAFNOSUPPORT), fail(unix.EBADF)); !errors.Is(err, unix.EBADF) {
		t.Errorf("events\nwant: %v\n got: %v", unix.EBADF, err)
	}
}
