// Package kernel finds a guest's kernel: its boot image, and its modules in the order in which they must be loaded.
//
// A kernel comes from Debian's package linux-image-cloud-amd64 (downloaded with apt-get, never installed), from package
// files, or from an unpacked folder. Its files are laid out as boot/vmlinuz-VERSION or lib/modules/VERSION/vmlinuz, and
// lib/modules/VERSION/kernel, in one package or split over several; there is no modules.dep (depmod makes that where a
// kernel is installed), so what a module needs is read from its own .modinfo section (the kernel's
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

// defaultCache is where downloaded and unpacked packages are kept when a Source names no other folder: wherever the program is started, the
// same one.
func defaultCache() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no folder for downloaded packages: %w: name one (--cache)", err)
	}
	return filepath.Join(dir, "directvol"), nil
}

// Source says where a kernel comes from. The zero value is Debian's package for virtual machines.
type Source struct {
	// Suite is the suite of Debian's archive that the package is taken from, such as trixie-backports, at the mirror that
	// the host's apt uses; empty is what the host's apt prefers.
	Suite string
	// Debs are the package files of one kernel, several where it is split. They are unpacked, not installed.
	Debs []string
	// Dir is a folder with a kernel package's files: boot/vmlinuz-VERSION or lib/modules/VERSION/vmlinuz, and
	// lib/modules/VERSION, or the latter below usr/.
	Dir string
	// Cache is a folder, made when it is missing, for packages downloaded and unpacked; empty is directvol in the user's cache folder
	// (os.UserCacheDir). Its
	// files are found by the package's SHA-256; removing it is always safe and is how a newer kernel is fetched.
	Cache string
	// Progress shows what is downloaded or unpacked; nil is silent.
	Progress *output.Progress
}

// Check says what is wrong with a Source, before anything is looked for.
func (src Source) Check() error {
	switch {
	case slices.Contains(src.Debs, ""):
		return errors.New("the name of a kernel package file is empty")
	case len(src.Debs) > 0 && src.Dir != "":
		return errors.New("a kernel package file and a kernel folder are both named: name one of them")
	case src.Suite != "" && (len(src.Debs) > 0 || src.Dir != ""):
		return errors.New("a suite to download the kernel from, and a kernel package file or folder are both named: name one of them")
	case src.Suite != "" && !suiteName.MatchString(src.Suite):
		return fmt.Errorf("%.80q is no name of a suite: want one such as trixie-backports", src.Suite)
	}
	return nil
}

// Open finds the kernel that src names. Without Debs and Dir the packages are downloaded once; with the packages in the
// cache neither the network nor apt is used.
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
		if debs, err = debianPackages(ctx, src); err != nil {
			return nil, fmt.Errorf("no kernel: %w; or name a kernel's package files (--kernel-deb) or unpacked folder (--kernel-dir)", err)
		}
	}
	dir, err := unpackOnce(ctx, debs, src.Cache, src.Progress)
	if err != nil {
		return nil, err
	}
	return openDir(dir)
}
