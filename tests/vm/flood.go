package vm

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/directvol/directvol/protocols/agentpb"
)

// Flood makes a call the given number of times, several at once, each with its own deadline, like
// callers that do not wait for each other. It returns the number of failed calls.
func Flood(ctx context.Context, calls, atOnce int, limit time.Duration, call func(context.Context) error) (failed int) {
	var left, errors atomic.Int64
	left.Store(int64(calls))
	var callers sync.WaitGroup
	for range atOnce {
		callers.Go(func() {
			for left.Add(-1) >= 0 {
				one, cancel := context.WithTimeout(ctx, limit)
				if call(one) != nil {
					errors.Add(1)
				}
				cancel()
			}
		})
	}
	callers.Wait()
	return int(errors.Load())
}

// Flooded makes calls of each kind that a hanging disk can delay and fail, on a mounted volume.
func (v *Volume) Flooded(ctx context.Context, calls, atOnce int, limit time.Duration, each func(kind string, failed int) error) error {
	agent := v.guest.Agent()
	disk, _ := v.guest.VM().Disk(v.DiskID())
	again := &agentpb.CreateContainerRequest{ContainerId: v.Container(), Storages: []*agentpb.Storage{{Driver: "blk", Source: disk.PCIPath, Fstype: v.FSType, MountPoint: v.GuestPath}}}
	for _, kind := range []struct {
		name string
		call func(context.Context) error
	}{
		{"ResizeVolume", func(ctx context.Context) error { return agent.ResizeVolume(ctx, v.GuestPath, 0) }},
		{"RemoveContainer", func(ctx context.Context) error { return agent.RemoveContainer(ctx, v.Container()) }},
		{"CreateContainer", func(ctx context.Context) error { return agent.CreateContainer(ctx, again) }},
		{"DestroySandbox", agent.DestroySandbox},
	} {
		if err := each(kind.name, Flood(ctx, calls, atOnce, limit, kind.call)); err != nil {
			return err
		}
	}
	return nil
}
