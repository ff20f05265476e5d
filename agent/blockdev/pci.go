package blockdev

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/protocols/pcipath"
)

// lookup returns a function that looks for a source once. The function's error wraps fs.ErrNotExist
// while there is no device. It waits for serials until ctx ends.
func lookup(ctx context.Context, source string) (func() (Device, error), error) {
	if strings.HasPrefix(source, "/") {
		clean := filepath.Clean(source)
		if !strings.HasPrefix(clean, "/dev/") {
			return nil, errkind.New(errkind.InvalidArgument, "source %.200q is not below /dev", source)
		}
		return func() (Device, error) {
			if serial, ok := SerialIn(clean); ok {
				return withSerial(ctx, serial)
			}
			return ByPath(clean)
		}, nil
	}
	path, err := pcipath.Parse(source)
	if err != nil {
		return nil, errkind.New(errkind.InvalidArgument, "source: %w", err)
	}
	return func() (Device, error) {
		device, err := byPCIPath("/", path)
		if err != nil {
			return Device{}, err
		}
		return ByPath(device.Path) // the node is created shortly after the entry in sysfs
	}, nil
}

// byPCIPath follows a path through sysfs below root: from the root bus into each bridge's slot, and
// from the last slot to the virtio disk. This kernel numbers the buses behind bridges, so byPCIPath
// takes their numbers from each bridge's pci_bus.
func byPCIPath(root string, path pcipath.Path) (Device, error) {
	bus := fmt.Sprintf("0000:%02x", path.RootBus)
	dir := filepath.Join(root, "sys/devices/pci"+bus)
	for i, slot := range path.Slots {
		dir = filepath.Join(dir, bus+":"+slot.String())
		if i == len(path.Slots)-1 {
			break
		}
		buses, err := only(filepath.Join(dir, "pci_bus/*"))
		if err != nil {
			return Device{}, err
		}
		bus = filepath.Base(buses)
	}
	block, err := only(filepath.Join(dir, "virtio*/block/*"))
	if err != nil {
		return Device{}, err
	}
	return fromSysfs(root, block)
}

// only returns the one path that a pattern matches.
func only(pattern string) (string, error) {
	found, err := filepath.Glob(pattern)
	if err != nil {
		return "", err
	}
	switch len(found) {
	case 0:
		return "", fmt.Errorf("%s: %w", pattern, fs.ErrNotExist)
	case 1:
		return found[0], nil
	}
	return "", fmt.Errorf("%s: %d matches where one is expected", pattern, len(found))
}
