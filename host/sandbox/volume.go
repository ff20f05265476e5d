package sandbox

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/guestpath"
)

// Volume is a volume for a sandbox.
type Volume struct {
	// ID names the volume, its disk and, for as long as no container of its
	// own uses it, the container that holds it in the guest.
	ID string
	// Path is its store on the host: an image file or a block device that
	// holds a filesystem and nothing else.
	Path string
	// FSType is ext4 or xfs, and Options are its mount options.
	FSType   string
	Options  []string
	ReadOnly bool
}

// attached is a volume whose disk the VM has, or is being given. Its lock is
// held for each call that changes it.
type attached struct {
	mu sync.Mutex
	Volume
	storage *agentpb.Storage // nil until the disk is there; written under Sandbox.mu too
	mounted bool             // as far as the agent has answered
}

// volumeID is what names both a disk and a container.
var volumeID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{1,24}$`)

// Attach gives the VM a volume's disk. The guest does not use it yet. Repeated
// with the same volume it changes nothing.
func (s *Sandbox) Attach(ctx context.Context, v Volume) error {
	if !volumeID.MatchString(v.ID) {
		return fmt.Errorf("volume id %.60q: want 2 to 25 letters, digits, '.', '_' and '-', the first a letter or digit", v.ID)
	}
	a, done := s.reserve(v)
	defer done()
	if a.storage != nil {
		if a.Path != v.Path || a.FSType != v.FSType || a.ReadOnly != v.ReadOnly || !slices.Equal(a.Options, v.Options) {
			return fmt.Errorf("volume %s is attached already, from %s as %s with %q: detach it first", v.ID, a.Path, a.FSType, a.Options)
		}
		return nil
	}
	storage, err := s.plug(ctx, v)
	if err != nil {
		s.drop(a)
		return fmt.Errorf("volume %s: %w", v.ID, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	a.Volume, a.storage = v, storage
	return nil
}

func (s *Sandbox) plug(ctx context.Context, v Volume) (*agentpb.Storage, error) {
	disk, err := s.vm.AttachDisk(ctx, qemu.Disk{ID: v.ID, Path: v.Path, ReadOnly: v.ReadOnly})
	if err != nil {
		return nil, err
	}
	mountPoint, err := guestpath.Of(disk.PCIPath)
	if err != nil {
		return nil, err
	}
	options := v.Options
	if v.ReadOnly {
		options = append([]string{"ro"}, options...)
	}
	return &agentpb.Storage{Driver: "blk", Source: disk.PCIPath, Fstype: v.FSType, Options: options, MountPoint: mountPoint}, nil
}

// Mount has the agent mount an attached volume, and returns where in the guest.
func (s *Sandbox) Mount(ctx context.Context, id string) (guestPath string, err error) {
	a, done, err := s.find(id)
	if err != nil {
		return "", err
	}
	defer done()
	err = s.agent.CreateContainer(ctx, &agentpb.CreateContainerRequest{ContainerId: id, Storages: []*agentpb.Storage{a.storage}})
	if err != nil {
		return "", fmt.Errorf("mount volume %s from %s: %w", id, a.Path, err)
	}
	a.mounted = true
	return a.storage.MountPoint, nil
}

// Unmount has the agent unmount a volume, which stays attached.
func (s *Sandbox) Unmount(ctx context.Context, id string) error {
	a, done, err := s.find(id)
	if err != nil {
		return err
	}
	defer done()
	return s.unmount(ctx, a)
}

func (s *Sandbox) unmount(ctx context.Context, a *attached) error {
	if err := s.agent.RemoveContainer(ctx, a.ID); err != nil {
		return fmt.Errorf("unmount volume %s: %w", a.ID, err)
	}
	a.mounted = false
	return nil
}

// Stats asks the agent for a mounted volume's usage and condition. It waits for
// no other call.
func (s *Sandbox) Stats(ctx context.Context, id string) (*agentpb.VolumeStatsResponse, error) {
	s.mu.Lock()
	var storage *agentpb.Storage
	if a := s.volumes[id]; a != nil {
		storage = a.storage
	}
	s.mu.Unlock()
	if storage == nil {
		return nil, s.notAttached(id)
	}
	stats, err := s.agent.GetVolumeStats(ctx, storage.MountPoint)
	if err != nil {
		return nil, fmt.Errorf("stats of volume %s: %w", id, err)
	}
	return stats, nil
}

// Resize makes a mounted volume's disk so many bytes large, and its filesystem
// fill it, while both are in use. It never makes anything smaller. Repeated, it
// goes on where it stopped.
func (s *Sandbox) Resize(ctx context.Context, id string, bytes uint64) error {
	a, done, err := s.find(id)
	if err != nil {
		return err
	}
	defer done()
	if !a.mounted {
		return fmt.Errorf("resize volume %s: it is not mounted: only the guest can grow its filesystem", id)
	}
	if err := s.canGrow(ctx, a.storage.MountPoint, bytes); err != nil {
		return fmt.Errorf("resize volume %s: its disk is as it was: %w", id, err)
	}
	if err := s.vm.ResizeDisk(ctx, id, bytes); err != nil {
		return fmt.Errorf("resize volume %s: %w", id, err)
	}
	if err := s.agent.ResizeVolume(ctx, a.storage.MountPoint, bytes); err != nil {
		return fmt.Errorf("resize volume %s: its disk has %d bytes now: %w", id, bytes, err)
	}
	return nil
}

// canGrow asks the agent before the disk grows, which it does for good. Of an
// agent without directvol's own service it is known only whether the filesystem
// can grow at all: asked to go to its device's end, it changes next to nothing.
func (s *Sandbox) canGrow(ctx context.Context, guestPath string, bytes uint64) error {
	err := s.agent.CheckResizeVolume(ctx, guestPath, bytes)
	if err == nil || !lacksService(err) {
		return err
	}
	return s.agent.ResizeVolume(ctx, guestPath, 0)
}

// lacksService tells an agent that has no such service: Go's ttrpc answers
// UNIMPLEMENTED for it, and Rust's INVALID_ARGUMENT with these words.
func lacksService(err error) bool {
	return status.Code(err) == codes.Unimplemented || status.Code(err) == codes.InvalidArgument && strings.Contains(err.Error(), "service does not exist")
}

// Detach unmounts a volume where it is mounted, and takes its disk away. A disk
// is never pulled from under a mount. A volume that is not attached is success.
func (s *Sandbox) Detach(ctx context.Context, id string) error {
	a, done, err := s.find(id)
	if err != nil {
		// Its disk may be half attached all the same.
		return s.vm.DetachDisk(ctx, id)
	}
	defer done()
	// Asked even where we think it unmounted: an answer may have been lost.
	if err := s.unmount(ctx, a); err != nil {
		return err
	}
	if err := s.vm.DetachDisk(ctx, id); err != nil {
		return fmt.Errorf("detach volume %s: %w", id, err)
	}
	s.drop(a)
	return nil
}

// reserve returns the entry of a volume, new or not, locked.
func (s *Sandbox) reserve(v Volume) (a *attached, done func()) {
	for {
		s.mu.Lock()
		a := s.volumes[v.ID]
		if a == nil {
			a = &attached{Volume: v}
			s.volumes[v.ID] = a
		}
		s.mu.Unlock()
		a.mu.Lock()
		if s.current(a) {
			return a, a.mu.Unlock
		}
		a.mu.Unlock() // it was dropped while we waited
	}
}

// find returns the entry of an attached volume, locked.
func (s *Sandbox) find(id string) (a *attached, done func(), err error) {
	s.mu.Lock()
	a = s.volumes[id]
	s.mu.Unlock()
	if a != nil {
		a.mu.Lock()
		if a.storage != nil && s.current(a) {
			return a, a.mu.Unlock, nil
		}
		a.mu.Unlock()
	}
	return nil, nil, s.notAttached(id)
}

func (s *Sandbox) notAttached(id string) error {
	return fmt.Errorf("volume %s is not attached to sandbox %s", id, s.id)
}

func (s *Sandbox) current(a *attached) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.volumes[a.ID] == a
}

func (s *Sandbox) drop(a *attached) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.volumes, a.ID)
}
