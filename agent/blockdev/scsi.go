package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/directvol/directvol/agent/refusal"
)

// Bounds of an address, as virtio-scsi's driver has them (VIRTIO_SCSI_MAX_TARGET
// and VIRTIO_SCSI_MAX_LUN in drivers/scsi/virtio_scsi.c).
const (
	scsiTargets = 256
	scsiUnits   = 16384
)

// scsiAddress is a unit of the guest's SCSI controller, whose only channel is 0.
type scsiAddress struct{ target, unit uint64 }

// parseSCSI reads "target:unit", both decimal.
func parseSCSI(text string) (scsiAddress, error) {
	target, unit, ok := strings.Cut(text, ":")
	t, err1 := strconv.ParseUint(target, 10, 16)
	u, err2 := strconv.ParseUint(unit, 10, 16)
	if !ok || err1 != nil || err2 != nil || t >= scsiTargets || u >= scsiUnits {
		return scsiAddress{}, fmt.Errorf("%.40q is no SCSI address: want ID:LUN, such as 0:1, below %d:%d", text, scsiTargets, scsiUnits)
	}
	return scsiAddress{t, u}, nil
}

// look finds the disk in sysfs (Documentation/driver-api/scsi.rst: devices are
// named host:channel:target:unit). root is "/" outside of tests.
func (a scsiAddress) look(root string) (Device, error) {
	block, err := only(filepath.Join(root, fmt.Sprintf("sys/bus/scsi/devices/*:0:%d:%d/block/*", a.target, a.unit)))
	if err != nil {
		return Device{}, err
	}
	return fromSysfs(root, block)
}

// scan has every controller look for the unit, and waits for it
// (Documentation/scsi/scsi_mid_low_api.rst: "channel target unit").
func (a scsiAddress) scan(root string) error {
	files, err := filepath.Glob(filepath.Join(root, "sys/class/scsi_host/host*/scan"))
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("the guest has no SCSI controller, or not its module: %w", fs.ErrNotExist)
	}
	var errs []error
	for _, file := range files {
		errs = append(errs, writeSysfs(file, fmt.Sprintf("0 %d %d", a.target, a.unit)))
	}
	return errors.Join(errs...)
}

// rescan has a SCSI disk ask for its capacity. Other disks have no such file.
func (d Device) rescan() {
	writeSysfs(filepath.Join("/sys/class/block", d.Name, "device/rescan"), "1")
}

// writeSysfs writes to a file that is there.
func writeSysfs(path, text string) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(text)
	return errors.Join(err, file.Close())
}

// FindSCSI is Find for a SCSI address, "ID:LUN". A unit that the kernel does not
// know yet is scanned for, besides being awaited.
func FindSCSI(ctx context.Context, source string) (Device, error) {
	address, err := parseSCSI(source)
	if err != nil {
		return Device{}, refusal.New(refusal.InvalidArgument, "source: %w", err)
	}
	look := func() (Device, error) {
		device, err := address.look("/")
		if err != nil {
			return Device{}, err
		}
		return ByPath(device.Path) // the node is made shortly after sysfs' entry
	}
	scanned := make(chan error, 1)
	if _, err := look(); errors.Is(err, fs.ErrNotExist) {
		go func() { scanned <- address.scan("/") }() // not awaited: it lasts for as long as a controller wants
	} else {
		close(scanned)
	}
	device, err := awaitDevice(ctx, look)
	if err == nil || ctx.Err() == nil {
		return device, err
	}
	select {
	case failed := <-scanned:
		if failed != nil {
			err = fmt.Errorf("%w (scan for it: %w)", err, failed)
		}
	default:
		err = fmt.Errorf("%w (a scan for it has not ended)", err)
	}
	return Device{}, err
}
