// Package kernel finds a guest's kernel: its boot image, and its modules in the order in which they must be loaded.
//
// A kernel comes from Debian's package linux-image-cloud-amd64 (downloaded with apt-get, never installed), from a
// package file, or from an unpacked folder. A package's files are laid out as boot/vmlinuz-VERSION and
// lib/modules/VERSION/kernel; there is no modules.dep in it (depmod makes that where a kernel is installed), so what a
// module needs is read from its own .modinfo section (the kernel's include/linux/module.h, MODULE_INFO).
package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// DefaultCache is where downloaded and unpacked packages are kept when a Source names no other folder.
const DefaultCache = "build/cache"

// Source says where a kernel comes from. The zero value is Debian's package for virtual machines.
type Source struct {
	// Deb is a kernel's package file. It is unpacked, not installed.
	Deb string
	// Dir is a folder with a kernel package's files: boot/vmlinuz-VERSION and lib/modules/VERSION, or the same below usr/.
	Dir string
	// Cache is a folder, made when it is missing, for packages downloaded and unpacked; empty is DefaultCache. Its
	// files are found by the package's SHA-256; removing it is always safe and is how a newer kernel is fetched.
	Cache string
	// Progress gets a line a second while something is downloaded or unpacked; nil means silence.
	Progress io.Writer
}

// Open finds the kernel that src names. Without Deb and Dir the package is downloaded once; with the package in the
// cache neither the network nor apt is used.
func Open(ctx context.Context, src Source) (*Kernel, error) {
	if src.Cache == "" {
		src.Cache = DefaultCache
	}
	if src.Progress == nil {
		src.Progress = io.Discard
	}
	switch {
	case src.Deb != "" && src.Dir != "":
		return nil, errors.New("a kernel package file and a kernel folder are both named: name one of them")
	case src.Dir != "":
		return openDir(src.Dir)
	}
	deb := src.Deb
	if deb == "" {
		var err error
		if deb, err = debianPackage(ctx, src.Cache, src.Progress); err != nil {
			return nil, fmt.Errorf("no kernel: %w; or name a kernel's package file (--kernel-deb) or unpacked folder (--kernel-dir)", err)
		}
	}
	dir, err := unpackOnce(ctx, deb, src.Cache, src.Progress)
	if err != nil {
		return nil, fmt.Errorf("unpack kernel package %s: %w", deb, err)
	}
	return openDir(dir)
}
