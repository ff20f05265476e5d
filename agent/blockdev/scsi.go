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
	"sync"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/flight"
	"github.com/directvol/directvol/agent/turns"
)

// Limits of an address, as in the virtio-scsi driver (VIRTIO_SCSI_MAX_TARGET and
// VIRTIO_SCSI_MAX_LUN in drivers/scsi/virtio_scsi.c).
const (
	scsiTargets = 256
	scsiUnits   = 16384
)

// scsiAddress is a unit of the guest's SCSI controller. Its only channel is 0.
type scsiAddress struct{ target, unit uint64 }

// parseSCSI parses "target:unit", both decimal.
func parseSCSI(text string) (scsiAddress, error) {
	target, unit, ok := strings.Cut(text, ":")
	t, err1 := strconv.ParseUint(target, 10, 16)
	u, err2 := strconv.ParseUint(unit, 10, 16)
	if !ok || err1 != nil || err2 != nil || t >= scsiTargets || u >= scsiUnits {
		return scsiAddress{}, fmt.Errorf("%.40q is not a SCSI address: want ID:LUN, such as 0:1, below %d:%d", text, scsiTargets, scsiUnits)
	}
	return scsiAddress{t, u}, nil
}

// look finds the disks at the address on all virtio-scsi controllers in sysfs
// (Documentation/driver-api/scsi.rst: devices are named host:channel:target:unit). If there are
// several, the caller selects one by its serial. root is "/" outside of tests.
func (a scsiAddress) look(root string) (found []Device, err error) {
	hosts, err := virtioHosts(root)
	if err != nil {
		return nil, err
	}
	for _, host := range hosts {
		number := strings.TrimPrefix(filepath.Base(host), "host")
		block, err := only(filepath.Join(root, fmt.Sprintf("sys/bus/scsi/devices/%s:0:%d:%d/block/*", number, a.target, a.unit)))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		device, err := fromSysfs(root, block)
		if err != nil {
			return nil, err
		}
		found = append(found, device)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("SCSI %d:%d: %w", a.target, a.unit, fs.ErrNotExist)
	}
	return found, nil
}

// virtioHosts returns the directories of the virtio-scsi controllers. Disks of other controllers,
// such as AHCI, have SCSI addresses too.
func virtioHosts(root string) (hosts []string, err error) {
	all, err := filepath.Glob(filepath.Join(root, "sys/class/scsi_host/host*"))
	if err != nil {
		return nil, err
	}
	for _, host := range all {
		driver, err := os.ReadFile(filepath.Join(host, "proc_name"))
		if err == nil && strings.TrimSpace(string(driver)) == "virtio_scsi" {
			hosts = append(hosts, host)
		}
	}
	return hosts, nil
}

// A write to a controller's file blocks as long as the controller does. So only one write per
// controller is in progress, shared by all callers.
var (
	scans       flight.Flights[unitScan, error]
	controllers turns.Turns // by directory
	rescans     flight.Flights[string, error]
)

type unitScan struct {
	host    string
	address scsiAddress
}

// errGoesOn means that a scan has not ended before its caller's deadline.
var errGoesOn = errors.New("it has not ended")

// scan makes every virtio-scsi controller look for the unit, and waits until ctx ends
// (Documentation/scsi/scsi_mid_low_api.rst: "channel target unit").
func (a scsiAddress) scan(ctx context.Context, root string) error {
	hosts, err := virtioHosts(root)
	if err != nil {
		return err
	}
	if len(hosts) == 0 {
		return fmt.Errorf("the guest has no virtio-scsi controller, or its module is not loaded: %w", fs.ErrNotExist)
	}
	errs := make([]error, len(hosts))
	var wait sync.WaitGroup
	for i, host := range hosts {
		wait.Go(func() { errs[i] = unitScan{host, a}.run(ctx) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

func (u unitScan) run(ctx context.Context) error {
	err, ended := scans.Anew(ctx, u, func() error {
		done, err := controllers.Take(context.Background(), u.host) // otherwise it would wait in the kernel, on a thread
		if err != nil {
			return err
		}
		defer done()
		return writeSysfs(filepath.Join(u.host, "scan"), fmt.Sprintf("0 %d %d", u.address.target, u.address.unit))
	})
	if !ended {
		return errGoesOn
	}
	return err
}

// rescan makes a SCSI disk reread its capacity, and waits until ctx ends. Other disks have no such
// file in sysfs.
func (d Device) rescan(ctx context.Context, root string) {
	file := filepath.Join(root, "sys/class/block", d.Name, "device/rescan")
	rescans.Anew(ctx, file, func() error { return writeSysfs(file, "1") })
}

// writeSysfs writes to an existing file.
func writeSysfs(path, text string) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(text)
	return errors.Join(err, file.Close())
}

// FindSCSI is Find for a SCSI address, "ID:LUN". If the kernel does not know the unit yet, FindSCSI
// also makes the controllers scan for it. If ctx has ended already, it only looks, and changes
// nothing in the guest.
func FindSCSI(ctx context.Context, source, serial string) (Device, error) {
	return findSCSI(ctx, "/", source, serial)
}

func findSCSI(ctx context.Context, root, source, serial string) (Device, error) {
	address, err := parseSCSI(source)
	if err != nil {
		return Device{}, errkind.New(errkind.InvalidArgument, "source: %w", err)
	}
	look := func() ([]Device, error) {
		devices, err := address.look(root)
		for i := range devices {
			if err == nil {
				devices[i], err = ByPath(devices[i].Path) // the node is created shortly after the entry in sysfs
			}
		}
		return devices, err
	}
	scanned := make(chan error, 1)
	if _, err := look(); errors.Is(err, fs.ErrNotExist) && ctx.Err() == nil {
		scanning, cancel := context.WithCancel(ctx)
		defer cancel()
		go func() { scanned <- address.scan(scanning, root) }()
	} else {
		close(scanned)
	}
	device, err := awaitDevice(ctx, serial, look)
	if err == nil || ctx.Err() == nil || errkind.Of(err) != errkind.Internal {
		return device, err
	}
	if failed := <-scanned; failed != nil { // the scan ends with ctx
		err = fmt.Errorf("%w (scan for it: %w)", err, failed)
	}
	return Device{}, err
}
