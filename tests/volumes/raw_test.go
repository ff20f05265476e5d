package volumes

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/vm"
)

// rawVolume returns a volume without a filesystem that the guest has, and the beginning of its
// content, which must not change.
func rawVolume(t *testing.T, g *vm.Guest, size int64) *vm.Volume {
	t.Helper()
	content := make([]byte, miB)
	rand.Read(content)
	image := filepath.Join(g.Dir, "raw.img")
	must(t, errors.Join(os.WriteFile(image, content, 0o600), os.Truncate(image, size)))
	v := g.Take(sandbox.Volume{ID: "raw", Path: image})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
		defer cancel()
		if err := v.Detach(ctx); err != nil {
			t.Error(err)
			return
		}
		after, err := os.ReadFile(image)
		if err != nil || !bytes.Equal(after[:miB], content) || bytes.Count(after[miB:], []byte{0}) != len(after)-miB {
			t.Errorf("the content of the volume has changed, error %v", err)
		}
		must(t, os.Remove(image))
	})
	must(t, v.Mount(limited(t)))
	return v
}

// A block device that a container uses without a filesystem grows when its kernel sees the new
// size.
func TestRawDeviceGrowsWhenTheGuestSeesItsSize(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	v := rawVolume(t, g, 64*miB)
	device, err := g.DeviceOf(limited(t), v.DiskID())
	must(t, err)
	refused(t, g.Agent().ResizeVolume(limited(t), v.GuestPath, 96*miB), codes.DeadlineExceeded, device, "67108864", "100663296")

	// The growth waits before the disk has the size: the guest's event ends the wait.
	var last *volumepb.GrowVolumeProgress
	begun, ended := make(chan struct{}), make(chan error, 1)
	c, ctx := client(t, g), within(t, jobLimit)
	go func() {
		ended <- c.GrowVolume(ctx, v.GuestPath, 96*miB, func(p *volumepb.GrowVolumeProgress) {
			if last == nil {
				close(begun)
			}
			last = p
		})
	}()
	select {
	case <-begun:
		must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), 96*miB))
		must(t, <-ended)
	case err := <-ended:
		t.Fatalf("it ended before the disk grew: %v", err)
	}
	if want := (&volumepb.GrowVolumeProgress{From: 64 * miB, Now: 96 * miB, Goal: 96 * miB, Done: true}); *last != *want {
		t.Errorf("\nwant %v\ngot  %v", want, last)
	}

	for range 2 {
		must(t, v.Resize(limited(t), 128*miB))
	}
	if size, err := g.Remote.DeviceSize(limited(t), device); err != nil || size != 128*miB {
		t.Errorf("size by the guest's kernel\nwant %d\ngot  %d, error %v", 128*miB, size, err)
	}
	if err := v.Resize(limited(t), 96*miB); !errors.Is(err, sandbox.ErrWouldShrink) {
		t.Errorf("\nwant %v\ngot  %v", sandbox.ErrWouldShrink, err)
	}
	for _, path := range []string{v.GuestPath, device} {
		s, err := g.Agent().GetVolumeStats(limited(t), path)
		if err != nil || s.VolumeCondition != nil || len(s.Usage) != 1 || *s.Usage[0] != (agentpb.VolumeUsage{Unit: agentpb.VolumeUsage_BYTES, Total: 128 * miB}) {
			t.Errorf("%s\nwant a capacity of %d bytes and no more\ngot  %v, error %v", path, 128*miB, s, err)
		}
		_, err = g.Agent().GetVolumeHealth(limited(t), path)
		refused(t, err, codes.FailedPrecondition, "not examined")
		one, err := g.Agent().GetVolume(limited(t), path)
		if err != nil || one.DeviceBytes != 128*miB || one.Filesystem != "" {
			t.Errorf("%s\nwant a device of %d bytes without a filesystem\ngot  %v, error %v", path, 128*miB, one, err)
		}
	}
	must(t, v.Detach(limited(t)))
	refused(t, g.Agent().ResizeVolume(limited(t), "/dev/disk/by-id/virtio-"+v.DiskID(), 128*miB), codes.NotFound, v.DiskID())
}

// OK for the disk below a mounted volume would be taken for a growth of its filesystem.
func TestDiskOfAMountedVolumeIsNoRawVolume(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "ext4")
	for _, path := range []string{sizes(t, v).Device, "/dev/disk/by-id/virtio-" + v.DiskID()} {
		refused(t, g.Agent().ResizeVolume(limited(t), path, 96*miB), codes.FailedPrecondition, v.GuestPath)
		_, err := g.Agent().GetVolumeStats(limited(t), path)
		refused(t, err, codes.FailedPrecondition, v.GuestPath)
	}
}
