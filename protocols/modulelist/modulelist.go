// Package modulelist defines the list of kernel modules in a guest's image. Package rootfs chooses
// the modules and writes the list. The agent, as PID 1, loads them, because the guest has no
// modprobe. The list is a text file with one absolute path per line, in load order. Each module is
// passed to finit_module(2) without parameters. Modules for filesystems that not every guest uses
// are in lists of their own, because they take long to load.
package modulelist

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
)

// Path is the list's path in the guest. Every image of package rootfs has the list; it may be
// empty.
const Path = "/etc/directvol/modules"

// BtrfsPath is the path in the guest of the list of modules for btrfs, which are loaded before the
// first mount of a btrfs.
const BtrfsPath = "/etc/directvol/modules-btrfs"

// Btrfs is the name of the module of btrfs. Every image has it, together with those that it needs.
const Btrfs = "btrfs"

// VsockTransport is the name, without ".ko", of the module through which the host reaches the
// agent: virtio's vsock.
const VsockTransport = "vmw_vsock_virtio_transport"

// Names returns the names of the modules that every image has, together with the modules that these
// need: vsock on virtio's PCI transport, by which the host reaches the agent; the modules for the
// agent's storages; and the power button, by which a host ends a guest that it cannot reach.
// Debian's kernel for virtual machines has ext4 built in.
func Names() []string {
	return []string{"virtio_pci", VsockTransport, "virtio_blk", "xfs", "virtio_scsi", "sd_mod", "virtiofs", "button"}
}

// Limits of a list.
const (
	// maxPath is the greatest length of a path in bytes, PATH_MAX of linux/limits.h.
	maxPath = 4096
	// maxModules is the greatest number of paths. A Debian kernel has about 4000 modules in all.
	maxModules = 10_000
)

// Read reads a list and skips empty lines. A relative path, a path that is too long, and too many
// paths are errors; the paths before the error are returned with it.
func Read(r io.Reader) (paths []string, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxPath+1)
	for lines.Scan() {
		line := lines.Text()
		if line == "" {
			continue
		}
		if err := check(line); err != nil {
			return paths, err
		}
		if len(paths) == maxModules {
			return paths, fmt.Errorf("module list: more than %d modules", maxModules)
		}
		paths = append(paths, line)
	}
	if err := lines.Err(); err != nil {
		return paths, fmt.Errorf("module list: %w", err)
	}
	return paths, nil
}

// Text returns the list of the paths in the file's format, which Read reads.
func Text(paths []string) ([]byte, error) {
	var b strings.Builder
	if len(paths) > maxModules {
		return nil, fmt.Errorf("module list: %d modules, at most %d are possible", len(paths), maxModules)
	}
	for _, p := range paths {
		if err := check(p); err != nil {
			return nil, err
		}
		b.WriteString(p + "\n")
	}
	return []byte(b.String()), nil
}

func check(p string) error {
	var err error
	switch {
	case !path.IsAbs(p):
		err = errors.New("want an absolute path")
	case len(p) > maxPath:
		err = fmt.Errorf("want at most %d bytes", maxPath)
	case strings.ContainsAny(p, "\r\n\x00"):
		err = errors.New("want a path of one line")
	default:
		return nil
	}
	return fmt.Errorf("module list: %.100q: %w", p, err)
}
