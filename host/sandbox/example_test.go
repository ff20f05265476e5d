package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/host/sandbox"
)

// Boot a machine, give it a volume, grow the volume while it is in use, and take it away again. It needs QEMU, and what `make guest`
// builds.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	s, err := sandbox.Start(ctx, sandbox.Config{ID: "example", Boot: func(ctx context.Context) (sandbox.Machine, error) {
		return qemu.StartMachine(ctx, qemu.Config{
			Dir:       "/run/example", // is made, and removed when the machine ends
			Kernel:    "build/vmlinuz",
			Initrd:    "build/guest.cpio",
			Directvol: "build/directvol", // the vsock backend, for hosts without /dev/vhost-vsock
			GuestCID:  3,
		})
	}})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Kill(ctx) // no harm after Stop

	data := sandbox.Volume{ID: "pvc-1", Path: "data.img", FSType: "ext4"} // mkfs.ext4 has made the image
	if err := s.Attach(ctx, data); err != nil {
		log.Fatal(err)
	}
	path, err := s.Mount(ctx, data.ID)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("mounted in the guest at", path)
	switch err := s.Resize(ctx, data.ID, 1<<30); {
	case errors.Is(err, sandbox.ErrOutcomeUnknown):
		fmt.Println("cut off; repeated, it goes on:", s.Resize(ctx, data.ID, 1<<30))
	case err != nil:
		log.Fatal(err)
	}
	stats, err := s.Stats(ctx, data.ID)
	if err != nil {
		log.Fatal(err)
	}
	for _, usage := range stats.Usage {
		fmt.Println(usage.Used, "of", usage.Total, usage.Unit)
	}
	fmt.Println(stats.VolumeCondition.GetMessage())
	if err := s.Detach(ctx, data.ID); err != nil { // unmounts it first
		log.Fatal(err)
	}
	if err := s.Stop(ctx); err != nil {
		log.Fatal(err)
	}
}

func ExampleError() {
	var s *sandbox.Sandbox // one that Start has returned
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
