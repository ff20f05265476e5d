package vm

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm/nbd"
)

// Volume is a scratch volume of a guest, with the host's knowledge of it.
type Volume struct {
	sandbox.Volume
	guest     *Guest
	GuestPath string    // where it is mounted; "" where it is not
	files     []written // files of this volume's writers

	// The fault below the disk, until Heal:
	faulty    bool
	server    *storeServer // nil if no process serves its store
	stopped   *nbd.Server  // nil if its disk does not stop in a flush
	throttled bool
}

// written is a file that a checksummed writer has written, or is writing.
type written struct {
	name   string
	writer *remote.Writer
}

// Volume formats a scratch disk of bytes bytes, and gives it an id. It does not attach the disk.
func (g *Guest) Volume(ctx context.Context, id, fstype string, bytes int64) (*Volume, error) {
	image, err := Scratch(ctx, g.Dir, fstype, bytes)
	if err != nil {
		return nil, err
	}
	return &Volume{Volume: sandbox.Volume{ID: id, Path: image, FSType: fstype}, guest: g}, nil
}

// Take returns a volume that belonged to another guest, which has ended.
func (g *Guest) Take(v sandbox.Volume) *Volume { return &Volume{Volume: v, guest: g} }

// Mount attaches the volume if necessary, and mounts it. If a busy guest sees the disk later than
// its agent waits, Mount asks again.
func (v *Volume) Mount(ctx context.Context) error {
	if err := v.guest.Attach(ctx, v.Volume); err != nil {
		return err
	}
	path, err := v.guest.Mount(ctx, v.ID)
	for status.Code(err) == codes.DeadlineExceeded && strings.Contains(err.Error(), "no device at") && ctx.Err() == nil {
		path, err = v.guest.Mount(ctx, v.ID)
	}
	v.GuestPath = path
	return err
}

// Unmount unmounts the volume. It stays attached.
func (v *Volume) Unmount(ctx context.Context) error {
	if err := v.guest.Unmount(ctx, v.ID); err != nil {
		return err
	}
	v.GuestPath = ""
	return nil
}

// Detach unmounts the volume and detaches its disk.
func (v *Volume) Detach(ctx context.Context) error {
	if err := v.guest.Detach(ctx, v.ID); err != nil {
		return err
	}
	v.GuestPath = ""
	return nil
}

// Container returns the id of the container that holds the volume in the guest.
func (v *Volume) Container() string { return sandbox.Holder(v.ID) }

// Stats returns the volume's statistics from the agent.
func (v *Volume) Stats(ctx context.Context) (*agentpb.VolumeStatsResponse, error) {
	return v.guest.Sandbox.Stats(ctx, v.ID)
}

// LookedStats returns statistics that include the agent's first examination. After a mount, the
// agent waits for that examination only as long as Kata's clients wait for an answer; LookedStats
// asks again if the agent says so.
func (v *Volume) LookedStats(ctx context.Context) (*agentpb.VolumeStatsResponse, error) {
	stats, err := v.Stats(ctx)
	for status.Code(err) == codes.DeadlineExceeded && ctx.Err() == nil {
		stats, err = v.Stats(ctx)
	}
	return stats, err
}

// Resize grows disk and filesystem.
func (v *Volume) Resize(ctx context.Context, bytes uint64) error {
	return v.guest.Sandbox.Resize(ctx, v.ID, bytes)
}

// StartWriter starts a checksummed writer on a separate file. The writer calls fsync for each block
// before it acknowledges the block to the host. It ends at limit bytes; with limit 0 it continues
// until it is stopped or fails.
func (v *Volume) StartWriter(ctx context.Context, limit uint64) (*remote.Writer, error) {
	n := len(v.files)
	name := fmt.Sprintf("written-%d", n)
	writer, err := v.guest.Remote.StartWriter(ctx, remote.WriteBlocks{Path: v.GuestPath + "/" + name, Seed: uint64(n), LimitBytes: limit})
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", v.ID, err)
	}
	v.files = append(v.files, written{name, writer})
	return writer, nil
}

// Verify reads every file of the volume's writers back, and compares it with the acknowledged sums.
// It returns the number of equal bytes; less than all of them is an error. progress, unless nil, is
// called after each block.
func (v *Volume) Verify(ctx context.Context, progress func(bytes uint64)) (uint64, error) {
	var sum uint64
	for _, f := range v.files {
		ledger := f.writer.Ledger()
		found, err := v.guest.Remote.Verify(ctx, v.GuestPath+"/"+f.name, ledger, func(read, _ uint64) {
			if progress != nil {
				progress(sum + read*uint64(ledger.BlockBytes()))
			}
		})
		sum += found.Bytes
		if err == nil {
			err = found.Err()
		}
		if err != nil {
			return sum, fmt.Errorf("volume %s: %s: %w", v.ID, f.name, err)
		}
	}
	return sum, nil
}

// Sizes are the sizes of a mounted volume, according to the guest's kernel.
type Sizes struct {
	Device      string // its /dev name
	DeviceBytes uint64
	FSBytes     uint64 // the filesystem's total, without the part that it keeps for itself
}

// Sizes asks the guest's kernel, not the agent.
func (v *Volume) Sizes(ctx context.Context) (Sizes, error) {
	device, err := v.guest.MountedDevice(ctx, v.GuestPath)
	if err != nil {
		return Sizes{}, err
	}
	bytes, err := v.guest.Remote.DeviceSize(ctx, device)
	if err != nil {
		return Sizes{}, err
	}
	fs, err := v.guest.Remote.StatFS(ctx, v.GuestPath)
	if err != nil {
		return Sizes{}, err
	}
	return Sizes{Device: device, DeviceBytes: bytes, FSBytes: fs.Blocks * uint64(fs.BlockSize)}, nil
}

// MountedDevice returns the /dev name of the source of the mount at a path, according to the
// guest's kernel.
func (g *Guest) MountedDevice(ctx context.Context, path string) (string, error) {
	mounts, err := g.Remote.ReadFile(ctx, "/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	return mountedDevice(string(mounts), path)
}

// mountedDevice returns the source of the mount at a path. The paths here contain no character that
// mountinfo escapes.
func mountedDevice(mountinfo, path string) (string, error) {
	for line := range strings.Lines(mountinfo) {
		fields := strings.Fields(line)
		dash := slices.Index(fields, "-")
		if len(fields) > 4 && fields[4] == path && dash >= 0 && dash+2 < len(fields) {
			return fields[dash+2], nil
		}
	}
	return "", fmt.Errorf("nothing is mounted at %s:\n%s", path, mountinfo)
}

// conditionInterval is the pause between two questions of AwaitCondition, because the agent sends
// no event.
const conditionInterval = 100 * time.Millisecond

// AwaitCondition asks for the volume's condition until wanted accepts it, and returns its message.
func (v *Volume) AwaitCondition(ctx context.Context, wanted func(*agentpb.VolumeCondition) bool) (string, error) {
	again := time.NewTicker(conditionInterval)
	defer again.Stop()
	for {
		stats, err := v.Stats(ctx)
		if err != nil {
			return "", err
		}
		if wanted(stats.VolumeCondition) {
			return stats.VolumeCondition.Message, nil
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("volume %s: its condition is still %q: %w", v.ID, stats.VolumeCondition.Message, ctx.Err())
		case <-again.C:
		}
	}
}

// Abnormal accepts an abnormal condition.
func Abnormal(c *agentpb.VolumeCondition) bool { return c.Abnormal }

// Healthy accepts the condition of a healthy volume.
func Healthy(c *agentpb.VolumeCondition) bool { return !c.Abnormal }

// RecordsErrors accepts the condition of a volume whose superblock records errors.
func RecordsErrors(c *agentpb.VolumeCondition) bool {
	return c.Abnormal && strings.Contains(c.Message, "records errors")
}

// Touch writes a small file and syncs it to the disk, which shows that the volume accepts writes.
func (v *Volume) Touch(ctx context.Context) error {
	path := v.GuestPath + "/touched"
	if err := v.guest.Remote.WriteFile(ctx, path, []byte(v.ID)); err != nil {
		return err
	}
	return v.guest.Remote.Sync(ctx, path)
}

// Health returns all conditions of the volume from the agent.
func (v *Volume) Health(ctx context.Context) ([]*volumepb.Condition, error) {
	return v.guest.Agent().GetVolumeHealth(ctx, v.GuestPath)
}

// AwaitHealth asks for the volume's conditions until wanted accepts them. It repeats a call that
// the agent does not answer in time.
func (v *Volume) AwaitHealth(ctx context.Context, wanted func([]*volumepb.Condition) bool) ([]*volumepb.Condition, error) {
	again := time.NewTicker(conditionInterval)
	defer again.Stop()
	for {
		conditions, err := v.Health(ctx)
		if err == nil && wanted(conditions) {
			return conditions, nil
		}
		if err != nil && status.Code(err) != codes.DeadlineExceeded {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("volume %s: its conditions are still %v (error %v): %w", v.ID, conditions, err, ctx.Err())
		case <-again.C:
		}
	}
}
