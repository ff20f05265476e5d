package sandbox

import (
	"context"
	"strings"

	"github.com/directvol/directvol/agent/arrival"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/protocols/agentpb"
)

// containerID is the pattern of Kata's container ids.
const containerID = `^[a-zA-Z0-9][a-zA-Z0-9_.-]+$`

// isContainerID reports whether an id matches containerID. It needs no package regexp, which would
// add 100 kB to a program that lies in the guest's memory.
func isContainerID(id string) bool {
	const first = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	return len(id) > 1 && strings.Trim(id[:1], first) == "" && strings.Trim(id[1:], first+"_.-") == ""
}

// containerIDBytes is the longest file name, because an id is used as one elsewhere.
const containerIDBytes = 255

func checkContainerID(id string) error {
	if len(id) > containerIDBytes || !isContainerID(id) {
		return errkind.New(errkind.InvalidArgument, "container id %.80q: want %d bytes at most that match %s", id, containerIDBytes, containerID)
	}
	return nil
}

// CreateContainer waits for a container's devices and holds its storages. A repeated call changes
// nothing.
func (s *Sandbox) CreateContainer(ctx context.Context, id string, storages []*agentpb.Storage, devices []*agentpb.Device) error {
	return s.createContainer(ctx, id, storages, func(ctx context.Context) (func() error, error) {
		return nil, s.storages.AwaitDevices(ctx, devices)
	})
}

func (s *Sandbox) createContainer(ctx context.Context, id string, storages []*agentpb.Storage, before ...step) error {
	if err := checkContainerID(id); err != nil {
		return err
	}
	return s.create(ctx, "container "+id, id, s.inTurn(id), func(ctx context.Context, agreed func() bool) error {
		return s.hold(ctx, id, storages, agreed, before)
	})
}

// RemoveContainer releases what a container holds. It interrupts a create in progress. Success
// means that nothing of the container is held, or about to be.
func (s *Sandbox) RemoveContainer(ctx context.Context, id string) error {
	if err := checkContainerID(id); err != nil {
		return err
	}
	ctx, cancel := limited(ctx)
	defer cancel()
	s.interrupt(errRemoved, func(c *create) bool { return c.id == id })
	return s.call(ctx, containerOf(id), s.inTurn(id), nil, func(ctx context.Context) error {
		return s.storages.Release(ctx, id)
	})
}

// CheckReleased returns nil if nothing in the guest uses a device (see storage.Table). With a
// container's id, it checks after the calls for this container that came before have ended; without
// an id it checks at once.
func (s *Sandbox) CheckReleased(ctx context.Context, id, driver, source string) error {
	if id == "" {
		arrival.Joined(ctx)
		return s.storages.CheckReleased(ctx, driver, source)
	}
	if err := checkContainerID(id); err != nil {
		return err
	}
	return s.call(ctx, containerOf(id), s.inTurn(id), nil, func(ctx context.Context) error {
		return s.storages.CheckReleased(ctx, driver, source)
	})
}
