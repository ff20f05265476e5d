// Package kernel finds a guest's kernel: its boot image, and its modules in the order in which they
// must be loaded.
//
// A kernel comes from Debian's package linux-image-cloud-amd64 (downloaded with apt-get, never
// installed), from package files, or from an unpacked directory. Its files are boot/vmlinuz-VERSION
// or lib/modules/VERSION/vmlinuz, and lib/modules/VERSION/kernel, in one package or split over
// several. There is no modules.dep, because depmod makes that file only when a kernel is installed.
// So the package reads each module's dependencies from its .modinfo section (the kernel's
// include/linux/module.h, MODULE_INFO).
package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/directvol/directvol/protocols/output"
)

// defaultCache returns the directory for downloaded and unpacked packages if a Source does not name
// one. It does not depend on the working directory.
func defaultCache() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no folder for downloaded packages: %w: name one (--cache)", err)
	}
	return filepath.Join(dir, "directvol"), nil
}

// Source describes where a kernel comes from. The zero value is Debian's package for virtual
// machines.
type Source struct {
	// Suite is the suite of Debian's archive with the package, such as trixie-backports, at the
	// mirror that the host's apt uses. Empty means the suite that the host's apt prefers.
	Suite string
	// Debs are the paths of the package files of one kernel, several if it is split. They are
	// unpacked, not installed.
	Debs []string
	// Dir is a directory with a kernel package's files: boot/vmlinuz-VERSION or
	// lib/modules/VERSION/vmlinuz, and lib/modules/VERSION. The latter two may be below usr/.
	Dir string
	// Cache is the directory for downloaded and unpacked packages; a missing one is made. Empty
	// means directvol in the user's cache directory (os.UserCacheDir). Its files are found by the
	// packages' SHA-256. Removing the directory is always safe; a newer kernel is downloaded then.
	Cache string
	// Progress shows what is being downloaded or unpacked; nil shows nothing.
	Progress *output.Progress
}

// Check returns an error if a Source is invalid. It does not access any file.
func (src Source) Check() error {
	switch {
	case slices.Contains(src.Debs, ""):
		return errors.New("the name of a kernel package file is empty")
	case len(src.Debs) > 0 && src.Dir != "":
		return errors.New("a kernel package file and a kernel folder are both named: name one of them")
	case src.Suite != "" && (len(src.Debs) > 0 || src.Dir != ""):
		return errors.New("a suite to download the kernel from, and a kernel package file or folder are both named: name one of them")
	case src.Suite != "" && !suiteName.MatchString(src.Suite):
		return fmt.Errorf("%.80q is not a suite name: want one such as trixie-backports", src.Suite)
	}
	return nil
}

// Open finds the kernel that src describes. Without Debs and Dir it downloads the packages once. If
// they are in the cache, it uses neither the network nor apt.
func Open(ctx context.Context, src Source) (*Kernel, error) {
	if err := src.Check(); err != nil {
		return nil, err
	}
	if src.Dir != "" {
		return openDir(src.Dir)
	}
	var err error
	if src.Cache == "" {
		if src.Cache, err = defaultCache(); err != nil {
			return nil, err
		}
	}
	debs := src.Debs
	if len(debs) == 0 {
		debs, err = debianPackages(ctx, src)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			return nil, fmt.Errorf("no kernel: %w; or name a kernel's package files (--kernel-deb) or unpacked folder (--kernel-dir)", err)
		}
	}
	dir, err := unpackOnce(ctx, debs, src.Cache, src.Progress)
	if err != nil {
		return nil, err
	}
	return openDir(dir)
}
