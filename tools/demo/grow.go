package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

const miB = 1 << 20

// plans lists the volumes of the demo. mkfs.xfs requires 300 MiB or more.
var plans = []struct {
	fstype        string
	before, after uint64
}{
	{"ext4", 96 * miB, 320 * miB},
	{"xfs", 304 * miB, 640 * miB},
}

// roomBytes returns the number of bytes that the volumes may occupy on the host's disk.
func roomBytes() (bytes uint64) {
	for _, plan := range plans {
		bytes += plan.after
	}
	return bytes
}

// growAfter is the number of bytes that a writer has acknowledged before its volume grows. The old
// filesystem is far from full then, so the writer never runs out of space.
const growAfter = 16 * miB

// volume is a volume and its part of the report.
type volume struct {
	*vm.Volume
	report *VolumeReport
}

// grow is the first half of the demo: each volume is attached, written to, grown while it is
// written to, read back and detached.
func grow(ctx context.Context, s *transcript, report *Report, guest *vm.Guest) ([]volume, error) {
	var volumes []volume
	for _, plan := range plans {
		s.section("A volume with %s, from %v to %v", plan.fstype, output.Size(plan.before), output.Size(plan.after))
		image, err := guest.Volume(ctx, plan.fstype, plan.fstype, int64(plan.before))
		if err != nil {
			return nil, err
		}
		v := volume{image, newVolumeReport(plan.fstype)}
		report.Volumes = append(report.Volumes, v.report)
		volumes = append(volumes, v)
		if err := v.growUnderWriter(ctx, s, plan.after); err != nil {
			return nil, err
		}
		if err := v.readBack(ctx, s); err != nil {
			return nil, err
		}
		if err := v.detach(ctx, s); err != nil {
			return nil, err
		}
	}
	return volumes, nil
}

func (v volume) growUnderWriter(ctx context.Context, s *transcript, goal uint64) error {
	if err := v.mount(ctx, s); err != nil {
		return err
	}
	writer, err := v.StartWriter(ctx, 0)
	if err != nil {
		return err
	}
	defer writer.Stop(ctx)
	if err := v.step(ctx, s, "write: 1 MiB blocks with sums, each fsynced, then acknowledged", firstBlocks(writer)); err != nil {
		return err
	}
	seen := func(v volume, ctx context.Context, _ func(string)) error {
		return s.watch.await(ctx, v, func(now *volumepb.Volume) bool { return now.FilesystemBytes == goal && now.Growth == nil })
	}
	if err := v.step(ctx, s, "grow disk and filesystem under the writer", growTo(goal), seen); err != nil {
		return err
	}
	return v.step(ctx, s, "keep writing, past the old filesystem's capacity", pastOldSize(writer))
}

func firstBlocks(writer *remote.Writer) part {
	return func(v volume, ctx context.Context, say func(string)) error {
		if err := writer.Await(ctx, growAfter); err != nil {
			return err
		}
		stats, err := v.LookedStats(ctx)
		if err != nil {
			return err
		}
		v.report.ConditionsBefore = conditions(stats)
		if len(v.report.ConditionsBefore) > 0 {
			return fmt.Errorf("its condition is not healthy: %s", stats.VolumeCondition.Message)
		}
		say(fmt.Sprintf("%v acknowledged, stats say %v used of %v", output.Size(writer.Ledger().Bytes()), output.Size(stats.Usage[0].Used), output.Size(stats.Usage[0].Total)))
		return nil
	}
}

// pastOldSize waits until the writer has acknowledged more bytes than the old device could hold,
// and then stops the writer.
func pastOldSize(writer *remote.Writer) part {
	return func(v volume, ctx context.Context, say func(string)) error {
		for bytes := uint64(growAfter); ; bytes += growAfter {
			if err := writer.Await(ctx, bytes); err != nil {
				return err
			}
			say(output.Size(writer.Ledger().Bytes()).String() + " acknowledged")
			if writer.Ledger().Bytes() > v.report.DeviceBytesBefore {
				return writer.Stop(ctx)
			}
		}
	}
}

// mount attaches and mounts the volume, and records its sizes at the first mount.
func (v volume) mount(ctx context.Context, s *transcript) error {
	return v.step(ctx, s, "attach the disk to the running VM and mount it", func(v volume, ctx context.Context, say func(string)) error {
		if err := v.Mount(ctx); err != nil {
			return err
		}
		sizes, err := v.Sizes(ctx)
		if err != nil {
			return err
		}
		say(fmt.Sprintf("%s, %v", sizes.Device, output.Size(sizes.DeviceBytes)))
		v.report.Device = sizes.Device
		if v.report.DeviceBytesBefore == 0 {
			v.report.DeviceBytesBefore, v.report.FSBytesBefore = sizes.DeviceBytes, sizes.FSBytes
		}
		return nil
	})
}

func growTo(goal uint64) part {
	return func(v volume, ctx context.Context, say func(string)) error {
		if err := v.Resize(ctx, goal); err != nil {
			return err
		}
		stats, err := v.LookedStats(ctx)
		if err != nil {
			return err
		}
		sizes, err := v.Sizes(ctx)
		if err != nil {
			return err
		}
		v.report.DeviceBytesAfter, v.report.FSBytesAfter = sizes.DeviceBytes, sizes.FSBytes
		say(fmt.Sprintf("stats say %v", output.Size(stats.Usage[0].Total)))
		switch {
		case sizes.DeviceBytes != goal:
			return fmt.Errorf("the guest's kernel has %d bytes of device, not %d", sizes.DeviceBytes, goal)
		case sizes.FSBytes <= v.report.DeviceBytesBefore:
			return fmt.Errorf("the filesystem has %d bytes, no more than the device had before", sizes.FSBytes)
		case stats.Usage[0].Total != sizes.FSBytes:
			return fmt.Errorf("stats say %d bytes in all, the guest's kernel %d", stats.Usage[0].Total, sizes.FSBytes)
		}
		return nil
	}
}

// readBack mounts the volume again before it compares the blocks, so that it reads the disk and not
// the page cache.
func (v volume) readBack(ctx context.Context, s *transcript) error {
	return v.step(ctx, s, "remount, read back and compare", func(v volume, ctx context.Context, say func(string)) error {
		if err := v.Unmount(ctx); err != nil {
			return err
		}
		if err := v.Mount(ctx); err != nil {
			return err
		}
		return v.compare(ctx, say)
	})
}

func (v volume) compare(ctx context.Context, say func(string)) error {
	bytes, err := v.Verify(ctx, func(bytes uint64) { say(output.Size(bytes).String() + " compared") })
	v.report.VerifiedBytes = bytes
	if err != nil {
		return err
	}
	say(output.Size(bytes).String() + " acknowledged, all there and equal")
	stats, err := v.LookedStats(ctx)
	if err != nil {
		return err
	}
	v.report.Stats = usages(stats)
	return nil
}

// detach detaches the disk and runs fsck on it on the host.
func (v volume) detach(ctx context.Context, s *transcript) error {
	return v.step(ctx, s, "unmount, detach, fsck on the host", func(v volume, ctx context.Context, say func(string)) error {
		if err := v.Detach(ctx); err != nil {
			return err
		}
		fsck, err := vm.Check(ctx, v.FSType, v.Path)
		if err != nil {
			return err
		}
		v.report.Fsck = &fsck
		if err := fsck.Err(v.FSType); err != nil {
			return errors.Join(errors.New("the filesystem is damaged"), err)
		}
		say("clean")
		return nil
	})
}
