package sandbox_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/host/sandbox"
)

func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	s, err := sandbox.Start(ctx, sandbox.Config{ID: "example", Boot: func(ctx context.Context) (sandbox.Machine, error) {
		return qemu.StartMachine(ctx, qemu.Config{
			Dir:       "/tmp/example", // made by the machine, and removed when it ends
			Kernel:    "build/vmlinuz",
			Initrd:    "build/guest.cpio",
			Directvol: "build/directvol", // the program that serves vsock if the host has no /dev/vhost-vsock
			GuestCID:  3,
		})
	}})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Kill(ctx) // does nothing after Stop
	volume := sandbox.Volume{ID: "pvc-1", Path: "data.img", FSType: "ext4"}
	if err := s.Attach(ctx, volume); err != nil {
		log.Panic(err)
	}
	path, err := s.Mount(ctx, volume.ID)
	if err != nil {
		log.Panic(err)
	}
	fmt.Println("mounted in the guest at", path)
	if err := s.Resize(ctx, volume.ID, 1<<30); err != nil { // the call may be repeated, also after an interruption
		log.Panic(err)
	}
	stats, err := s.Stats(ctx, volume.ID)
	if err != nil {
		log.Panic(err)
	}
	for _, usage := range stats.Usage {
		fmt.Println(usage.Used, "of", usage.Total, usage.Unit)
	}
	fmt.Println(stats.VolumeCondition.GetMessage())
	if err := s.Detach(ctx, volume.ID); err != nil { // also unmounts the volume
		log.Panic(err)
	}
	if err := s.Stop(ctx); err != nil {
		log.Panic(err)
	}
}
