package blockdev

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/protocols/pcipath"
)

// FuzzSysfs gives a bus behind a bridge, a disk on it and the disk's dev file any names and text,
// and looks the disk up by its PCI path and as a SCSI unit. Neither lookup may return a node other
// than the disk's.
func FuzzSysfs(f *testing.F) {
	f.Add("0000:03", "vda", "254:0\n")
	f.Add("0000:03", "etherd!e0.0", "152:16\n")
	f.Add("0000:0[", "v*a", "254:0 \n")
	f.Add("*", "[a-", "")
	f.Add("..x", "..vda", "1:2:3")
	f.Add("\\", "vd\na", "4294967295:4294967295")
	top := inMemory(f)
	f.Fuzz(func(t *testing.T, bus, disk, number string) {
		if !isFileName(bus) || !isFileName(disk) {
			return
		}
		root, err := os.MkdirTemp(top, "")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(root)
		bridge := filepath.Join(root, "sys/devices/pci0000:00/0000:00:02.0")
		function := filepath.Join(bridge, bus+":01.0")
		host := filepath.Join(root, "sys/class/scsi_host/host2")
		unit := filepath.Join(root, "sys/bus/scsi/devices/2:0:0:1")
		for _, block := range []string{filepath.Join(function, "virtio1/block", disk), filepath.Join(unit, "block", disk)} {
			err = errors.Join(err, os.MkdirAll(block, 0o755), os.WriteFile(filepath.Join(block, "dev"), []byte(number), 0o644))
		}
		if err := errors.Join(err, os.MkdirAll(filepath.Join(bridge, "pci_bus", bus), 0o755), os.MkdirAll(host, 0o755), os.WriteFile(filepath.Join(host, "proc_name"), []byte("virtio_scsi\n"), 0o644)); err != nil {
			t.Fatal(err)
		}
		want, numberErr := ParseNumber(number)
		byPath, pathErr := byPCIPath(root, pcipath.Path{Slots: []pcipath.Slot{{Device: 2}, {Device: 1}}})
		var byAddress Device
		all, addressErr := scsiAddress{0, 1}.look(root)
		if addressErr == nil {
			byAddress = all[0]
		}
		for _, found := range []struct {
			Device
			err error
		}{{byPath, pathErr}, {byAddress, addressErr}} {
			node := filepath.Join(root, "dev", strings.ReplaceAll(disk, "!", "/"))
			if found.err == nil && (numberErr != nil || found.Device != Device{node, disk, want, 0}) {
				t.Errorf("bus %q, disk %q of %q\nwant %+v, %v\ngot  %+v", bus, disk, number, Device{node, disk, want, 0}, numberErr, found.Device)
			}
			if found.err != nil && numberErr == nil && plain(bus) && plain(disk) {
				t.Errorf("bus %q, disk %q of %q\nwant it found\ngot  %v", bus, disk, number, found.err)
			}
			if errors.Is(found.err, fs.ErrNotExist) && plain(bus) {
				t.Errorf("bus %q, disk %q\nwant no error that waits\ngot  %v", bus, disk, found.err)
			}
		}
	})
}

// inMemory returns a directory, on a tmpfs if there is one, because a disk is twenty times slower.
func inMemory(f *testing.F) string {
	dir, err := os.MkdirTemp("/dev/shm", "directvol-sysfs-")
	if err != nil {
		return f.TempDir()
	}
	f.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// isFileName reports whether a directory can hold an entry with this name. A filesystem allows 255
// bytes, and the bus is a part of another name.
func isFileName(name string) bool {
	return name != "" && name != "." && name != ".." && len(name) < 200 && !strings.ContainsAny(name, "/\x00")
}

// plain reports whether the kernel could give this name to a device or a bus.
func plain(name string) bool {
	return strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789:!-") == ""
}
