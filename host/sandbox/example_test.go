package sandbox_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/directvol/directvol/host/sandbox"
)

func ExampleError() {
	var s *sandbox.Sandbox // returned by Start
	err := s.Detach(context.Background(), "pvc-1")
	if failed := new(sandbox.Error); errors.As(err, &failed) {
		fmt.Println(failed.Call, failed.Volume, failed.State)
	}
	if errors.Is(err, sandbox.ErrBusy) {
		fmt.Println("something in the guest uses it: try again later")
	}
}

func ExampleDiskID() {
	fmt.Println(sandbox.DiskID("pvc-1"), len(sandbox.DiskID("pvc-1")), "bytes")
	fmt.Println(sandbox.Holder("pvc-1"))
	// Output:
	// dv6kdi4gvhzk3gsul4 18 bytes
	// volume-dv6kdi4gvhzk3gsul4
}
