package vm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Build holds the absolute paths of the files that make has built.
type Build struct {
	Dir       string // build/
	Directvol string // the host's program
	Kernel    string
	Image     string // the guest's image, as it is shipped
	TestImage string // the same image with tests/guest in it

	// A newer kernel, a test image for it and the image that rescue boots. Only some tests need
	// them: see Newer and Rescue.
	newerKernel, newerImage, rescueImage string
}

// FindBuild looks in build/ at the top of the repository of the working directory. Its error names
// a missing file and the make target for it.
func FindBuild() (Build, error) {
	top, err := os.Getwd()
	if err != nil {
		return Build{}, err
	}
	for !exists(filepath.Join(top, "Makefile")) { // not go.mod, because a folder below has one, too
		parent := filepath.Dir(top)
		if parent == top {
			return Build{}, errors.New("no Makefile here or above: run this in the repository")
		}
		top = parent
	}
	dir := filepath.Join(top, "build")
	b := Build{
		Dir:       dir,
		Directvol: filepath.Join(dir, "directvol"),
		Kernel:    filepath.Join(dir, "vmlinuz"),
		Image:     filepath.Join(dir, "guest.cpio"),
		TestImage: filepath.Join(dir, "guest-test.cpio"),

		newerKernel: filepath.Join(dir, "rescue-vmlinuz"),
		newerImage:  filepath.Join(dir, "rescue-test.cpio"),
		rescueImage: filepath.Join(dir, "rescue.cpio"),
	}
	for _, product := range []struct{ path, target string }{
		{b.Directvol, "build"}, {b.Kernel, "guest"}, {b.Image, "guest"}, {b.TestImage, "guest"},
	} {
		if !exists(product.path) {
			return b, fmt.Errorf("build/%s is missing: run make %s", filepath.Base(product.path), product.target)
		}
	}
	return b, nil
}

// Newer returns the newer kernel and a test image for it.
func (b Build) Newer() (kernel, image string, err error) { return b.withNewerKernel(b.newerImage) }

// Rescue returns the kernel and the image that `directvol rescue` boots.
func (b Build) Rescue() (kernel, image string, err error) { return b.withNewerKernel(b.rescueImage) }

func (b Build) withNewerKernel(image string) (kernel, _ string, err error) {
	for _, path := range []string{b.newerKernel, image} {
		if !exists(path) {
			return "", "", fmt.Errorf("build/%s is missing: run make rescue", filepath.Base(path))
		}
	}
	return b.newerKernel, image, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
