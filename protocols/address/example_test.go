package address_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/directvol/directvol/protocols/address"
)

func ExampleParse() {
	for _, text := range []string{"vsock://3:1024", "hvsock:///run/vm/vsock.sock:1024", "unix:///run/agent.sock", "3:1024"} {
		a, err := address.Parse(text)
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Printf("%s: scheme %s, context ID %d, port %d, path %q\n", a, a.Scheme, a.CID, a.Port, a.Path)
	}
	// Output:
	// vsock://3:1024: scheme vsock, context ID 3, port 1024, path ""
	// hvsock:///run/vm/vsock.sock:1024: scheme hvsock, context ID 0, port 1024, path "/run/vm/vsock.sock"
	// unix:///run/agent.sock: scheme unix, context ID 0, port 0, path "/run/agent.sock"
	// address "3:1024": no scheme: want vsock://CID:PORT, hvsock:///path:PORT or unix:///path
}

// The example makes a socket to which only its owner may connect, and connects to it.
func ExampleAddress_Dial() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "agent.sock")
	socket, err := address.ListenUnix(path)
	if err != nil {
		log.Fatal(err)
	}
	defer socket.Remove()
	file := os.NewFile(uintptr(socket.FD), path)
	listener, err := net.FileListener(file)
	if err != nil {
		log.Fatal(err)
	}
	file.Close() // the listener has its own descriptor
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		fmt.Fprint(conn, "hello")
		conn.Close()
	}()

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := address.Address{Scheme: address.Unix, Path: path}.Dial(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	said, err := io.ReadAll(conn)
	fmt.Printf("%s %v\n", said, err)
	// Output: hello <nil>
}
