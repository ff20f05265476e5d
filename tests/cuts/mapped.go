package cuts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/directvol/directvol/host/rescue"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/vm"
)

// keptBytes is what a mapping leaves out, as cryptsetup does for the header of LUKS.
const keptBytes = 16 * miB

// shift moves the content of an image by bytes that a mapping leaves out.
func shift(path string, by int64) error {
	moved := path + ".moved"
	if err := vm.CopySparseMoved(moved, path, by); err != nil {
		return err
	}
	return os.Rename(moved, path)
}

// stack makes the mapping of the attached disk, to the disk's end.
//
//	ext4 ─ linear ─ disk
func (d *disk) stack(ctx context.Context) error {
	device, err := d.guest.DeviceOf(ctx, d.diskID())
	if err != nil {
		return err
	}
	size, err := d.guest.Remote.DeviceSize(ctx, device)
	if err != nil {
		return err
	}
	const sector = 512
	if _, err := d.guest.Run(ctx, dmsetup, "create", d.id, "--table", fmt.Sprintf("0 %d linear %s %d", (size-d.kept)/sector, device, d.kept/sector)); err != nil {
		return err
	}
	minor, err := d.guest.Run(ctx, dmsetup, "info", "-c", "--noheadings", "-o", "minor", d.id)
	d.device = "/dev/dm-" + strings.TrimSpace(minor)
	return err
}

const dmsetup = "/usr/sbin/dmsetup"

func (d *disk) unstack(ctx context.Context) error {
	_, err := d.guest.Run(ctx, dmsetup, "remove", d.id)
	return err
}

func (d *disk) mountMapped(ctx context.Context) error {
	d.mounted = "/run/cuts/" + d.id
	return d.guest.Agent().CreateContainer(ctx, &agentpb.CreateContainerRequest{ContainerId: d.id, Storages: []*agentpb.Storage{
		{Driver: "blk", Source: d.device, Fstype: d.fstype, MountPoint: d.mounted},
	}})
}

func (d *disk) unmountMapped(ctx context.Context) error {
	return d.guest.Agent().RemoveContainer(ctx, d.id)
}

// growMapped grows the disk, and then the mapping and the filesystem by one call of the agent.
func (d *disk) growMapped(ctx context.Context, bytes uint64) error {
	if err := d.guest.VM().ResizeDisk(ctx, d.diskID(), bytes); err != nil {
		return err
	}
	return d.guest.Agent().ResizeVolume(ctx, d.mounted, bytes)
}

// end returns where the filesystem ends on the disk, according to its superblock on an image.
func (d *disk) end(path string) (uint64, error) {
	image, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer image.Close()
	size, err := vm.FilesystemSize(d.fstype, shifted{image, int64(d.kept)})
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return size + d.kept, nil
}

// checked returns the name by which the check finds the filesystem in an image (e2fsck(8)).
func (d *disk) checked(path string) string {
	if d.kept == 0 {
		return path
	}
	return path + "?offset=" + strconv.FormatUint(d.kept, 10)
}

// errMappedWay is the error of a manual run that only the agent can make.
var errMappedWay = errors.New("CUTS_FORMATS=mapped needs CUTS_WAY=agent and the ordinary kernel")

// rescue runs `directvol rescue`, for a volume on a mapping on a copy of what the mapping has.
func (d *disk) rescue(ctx context.Context, c rescue.Config) (rescue.Report, error) {
	if d.kept == 0 {
		return rescue.Run(ctx, c)
	}
	if err := shift(c.Disk, -int64(d.kept)); err != nil {
		return rescue.Report{}, err
	}
	report, err := rescue.Run(ctx, c)
	return report, errors.Join(err, shift(c.Disk, int64(d.kept)))
}
