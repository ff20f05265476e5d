package agentclient_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/protocols/address"
)

// The example grows a volume whose disk has grown already, and reads its health. It needs a guest
// whose agent answers at the address.
func Example() {
	to, err := address.Parse("hvsock:///run/vm/vsock.sock:1024")
	if err != nil {
		log.Fatal(err)
	}
	agent := agentclient.New(to, agentclient.Config{}) // dials at the first call, and again after the connection has broken
	defer agent.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	const path = "/run/kata-containers/sandbox/storage/MDIvMDE="
	err = agent.ResizeVolume(ctx, path, 10<<30)
	switch status.Code(err) {
	case codes.OK:
		fmt.Println("the filesystem has 10 GiB")
	case codes.DeadlineExceeded:
		fmt.Println("not yet, call again:", err)
	case codes.OutOfRange:
		fmt.Println("it is larger already, and nothing shrinks:", err)
	default:
		log.Fatal(err)
	}
	conditions, err := agent.GetVolumeHealth(ctx, path)
	if err != nil {
		log.Fatal(err)
	}
	for _, c := range conditions {
		fmt.Println(c.Status, c.Reason, c.Message)
	}
}

// If the answer is lost, a call that could do harm when repeated is not repeated.
func ExampleErrOutcomeUnknown() {
	agent := agentclient.New(address.Address{Scheme: address.VSock, CID: 3, Port: 1024}, agentclient.Config{})
	defer agent.Close()
	err := agent.RemoveContainer(context.Background(), "c1")
	if errors.Is(err, agentclient.ErrOutcomeUnknown) {
		fmt.Println("look whether c1 is there before the next call")
	}
}

func ExampleDial() {
	_, err := agentclient.Dial(context.Background(), address.Address{Scheme: address.Unix, Path: "/nowhere/agent.sock"}, agentclient.Config{})
	fmt.Println(err)
	// Output: dial unix:///nowhere/agent.sock: dial unix /nowhere/agent.sock: connect: no such file or directory
}
