// Package rootfs builds the image from which a guest boots: an initramfs with the given programs
// and the few kernel modules that they need, together with the matching kernel. It does not need
// root, and the same input gives the same bytes.
//
// The image is a cpio archive in the "newc" format
// (Documentation/driver-api/early-userspace/buffer-format.rst in the kernel's sources). It is not
// compressed, because that does not save time: under emulation a guest takes as long to inflate
// gzip as the smaller image saves, and half a second longer for xz.
package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"

	"github.com/directvol/directvol/protocols/modulelist"
	"github.com/directvol/directvol/rootfs/kernel"
)

// Program is a file of the host to be put into the image.
type Program struct {
	// Guest is the program's absolute path in the guest.
	Guest string
	// Host is the path of the program's file on the host.
	Host string
}

// Image describes an image to build.
type Image struct {
	// Kernel is the source of the kernel; the zero value is Debian's package.
	Kernel kernel.Source
	// Modules are the names of modules in addition to modulelist.Names. Modules that are built into
	// the kernel are skipped.
	Modules []string
	// Programs are put into the image with mode 0755. One must be /init, which the kernel starts as
	// PID 1.
	Programs []Program
	// Out and KernelOut are the host paths for the image and its kernel. Their directories must
	// exist. Each file is replaced completely or not at all.
	Out, KernelOut string
}

// Result describes the built files.
type Result struct {
	// Kernel is the kernel's release, as the guest's uname -r prints it.
	Kernel string `json:"kernel"`
	// Modules are the paths in the guest of the modules that it loads at boot, in load order.
	Modules []string `json:"modules"`
	// Image is the image's path on the host, and ImageBytes its size.
	Image      string `json:"image"`
	ImageBytes int64  `json:"image_bytes"`
	// KernelImage is the kernel's path on the host, and KernelBytes its size.
	KernelImage string `json:"kernel_image"`
	KernelBytes int64  `json:"kernel_bytes"`
}

// Build makes the image and copies its kernel. After an error, including a cancelled ctx, both
// files are unchanged, or only the kernel is new.
func Build(ctx context.Context, img Image) (Result, error) {
	if img.Out == "" || img.KernelOut == "" {
		return Result{}, errors.New("build image: the path of the image or of the kernel is missing: name both")
	}
	if filepath.Clean(img.Out) == filepath.Clean(img.KernelOut) {
		return Result{}, fmt.Errorf("build image: %s is named for both the image and the kernel", img.Out)
	}
	for _, file := range []string{img.Out, img.KernelOut} { // checked before anything is downloaded
		if err := canReplace(file); err != nil {
			return Result{}, fmt.Errorf("build image: %w", err)
		}
	}
	a := newArchive()
	if err := addPrograms(a, img.Programs); err != nil {
		return Result{}, err
	}
	if err := a.checkInit(); err != nil {
		return Result{}, err
	}
	k, err := kernel.Open(ctx, img.Kernel)
	if err != nil {
		return Result{}, err
	}
	result := Result{Kernel: k.Version, Image: img.Out, KernelImage: img.KernelOut}
	if result.Modules, err = addModules(a, k, append(modulelist.Names(), img.Modules...)); err != nil {
		return Result{}, err
	}
	vmlinuz, err := os.Open(k.Image)
	if err != nil {
		return Result{}, err
	}
	defer vmlinuz.Close()
	if result.KernelBytes, err = replaceFile(ctx, img.KernelOut, vmlinuz.WriteTo); err != nil {
		return Result{}, fmt.Errorf("write kernel %s: %w", img.KernelOut, err)
	}
	if result.ImageBytes, err = replaceFile(ctx, img.Out, a.WriteTo); err != nil {
		return Result{}, fmt.Errorf("write image %s: %w", img.Out, err)
	}
	return result, nil
}

// addModules adds the modules and their lists to the image, and returns the guest paths of those
// that are loaded at boot, in load order.
func addModules(a *archive, k *kernel.Kernel, names []string) ([]string, error) {
	atBoot, err := k.Order(names...)
	if err != nil {
		return nil, err
	}
	all, err := k.Order(append(names, modulelist.Btrfs)...) // those at boot come first
	if err != nil {
		return nil, err
	}
	var paths, later []string
	for i, m := range all {
		data, err := m.Read()
		if err != nil {
			return nil, err
		}
		guest := path.Join("/lib/modules", k.Version, m.Path)
		if err := a.addFile(guest, 0o644, data); err != nil {
			return nil, err
		}
		if i < len(atBoot) {
			paths = append(paths, guest)
		} else {
			later = append(later, guest)
		}
	}
	builtIn, err := k.BuiltInList()
	if err == nil {
		err = a.addFile(path.Join("/lib/modules", k.Version, "modules.builtin"), 0o644, builtIn)
	}
	if err != nil {
		return nil, err
	}
	if err := addList(a, modulelist.Path, paths); err != nil {
		return nil, err
	}
	return paths, addList(a, modulelist.BtrfsPath, later)
}

// addList adds a list of modules to the image.
func addList(a *archive, guest string, paths []string) error {
	list, err := modulelist.Text(paths)
	if err != nil {
		return err
	}
	return a.addFile(guest, 0o644, list)
}

func addPrograms(a *archive, programs []Program) error {
	for _, p := range programs {
		info, err := os.Stat(p.Host)
		if err == nil && !info.Mode().IsRegular() { // a device's content may be endless
			err = fmt.Errorf("%s is not a regular file", p.Host)
		}
		if err != nil {
			return fmt.Errorf("program %s: %w", p.Guest, err)
		}
		data, err := os.ReadFile(p.Host)
		if err != nil {
			return fmt.Errorf("program %s: %w", p.Guest, err)
		}
		if err := a.addFile(p.Guest, 0o755, data); err != nil {
			return fmt.Errorf("program %s: %w", p.Host, err)
		}
	}
	return nil
}
