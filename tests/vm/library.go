package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"

	"github.com/u-root/u-root/pkg/ldd"

	"github.com/directvol/directvol/rootfs"
)

// file is a file of the host, and its name in the guest.
type file struct{ name, path string }

// linked is what a program needs to start: the path of the loader in the program (elf(5),
// PT_INTERP), and the files of the loader and of the shared libraries.
type linked struct {
	loader string
	files  []file
}

// inImage is a folder in which every loader of Debian looks for libraries (ld.so(8)).
const inImage = "/lib/x86_64-linux-gnu"

// Linked returns the files that an image needs to run a program of the host at a path of the guest:
// the program, its loader and its shared libraries.
func Linked(guest, program string) ([]rootfs.Program, error) {
	needs, err := sharedLibraries(program)
	if err != nil {
		return nil, err
	}
	files := []rootfs.Program{{Guest: guest, Host: program}, {Guest: needs.loader, Host: needs.files[0].path}}
	for _, f := range needs.files[1:] {
		files = append(files, rootfs.Program{Guest: path.Join(inImage, f.name), Host: f.path})
	}
	return files, nil
}

// sharedLibraries returns the shared libraries of a program, including those of the libraries, by
// asking the program's loader (ld.so(8), --list), as ldd(1) does. The loader is the first of the
// files.
func sharedLibraries(program string) (linked, error) {
	loader, err := ldd.GetInterp(program)
	switch {
	case err != nil:
		return linked{}, err
	case !filepath.IsAbs(loader):
		return linked{}, fmt.Errorf("%s: no loader: it is not dynamically linked", program)
	}
	libraries, err := ldd.List(program)
	if err != nil {
		return linked{}, fmt.Errorf("find the shared libraries of %s, and install the package of one that is missing (of kata-agent's: libc6, libseccomp2, libgcc-s1): %w", program, err)
	}
	slices.Sort(libraries) // List returns them in no fixed order
	found := linked{loader, []file{{filepath.Base(loader), loader}}}
	for _, library := range libraries {
		if library != loader {
			found.files = append(found.files, file{filepath.Base(library), library})
		}
	}
	return found, nil
}

// imageOf makes an ext4 image below dir that contains the files as programs.
func imageOf(ctx context.Context, dir string, files []file) (string, error) {
	content, err := os.MkdirTemp(dir, "programs-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(content)
	for _, f := range files {
		if err := copyProgram(filepath.Join(content, f.name), f.path); err != nil {
			return "", err
		}
	}
	image, err := filepath.Abs(content + ".img")
	if err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-d", content, image, "128M").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("mkfs.ext4: %w\n%s", err, out)
	}
	return image, nil
}

func copyProgram(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
