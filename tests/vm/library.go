package vm

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/directvol/directvol/rootfs"
)

// file is a file of the host, and the name it is to have.
type file struct{ name, path string }

// linked is what a program needs to start: the loader's path, as the program
// names it (elf(5), PT_INTERP), and the files of loader and shared libraries.
type linked struct {
	loader string
	files  []file
}

// inImage is a folder where every loader of Debian looks for libraries (ld.so(8)).
const inImage = "/lib/x86_64-linux-gnu"

// Linked returns what an image needs for a program of the host at a path of the
// guest: the program, its loader and its shared libraries.
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

// libraryDirs are where Debian keeps shared libraries.
var libraryDirs = []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"}

// maxLoader bounds a path that a program gives, in bytes.
const maxLoader = 256

// sharedLibraries finds what a program is linked to, and what that is linked to
// (elf(5), DT_NEEDED).
func sharedLibraries(program string) (linked, error) {
	loader, err := loaderOf(program)
	if err != nil {
		return linked{}, err
	}
	found := linked{loader, []file{{filepath.Base(loader), loader}}}
	missing := []string{program}
	for len(missing) > 0 {
		names, dirs, err := needed(missing[0])
		if err != nil {
			return linked{}, err
		}
		missing = missing[1:]
		for _, name := range names {
			if slices.ContainsFunc(found.files, func(f file) bool { return f.name == name }) {
				continue
			}
			path, err := findLibrary(name, append(dirs, libraryDirs...))
			if err != nil {
				return linked{}, fmt.Errorf("%s: %w", program, err)
			}
			found.files = append(found.files, file{name, path})
			missing = append(missing, path)
		}
	}
	return found, nil
}

func loaderOf(program string) (string, error) {
	f, err := elf.Open(program)
	if err != nil {
		return "", fmt.Errorf("%s: %w", program, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		text, err := io.ReadAll(io.LimitReader(p.Open(), maxLoader))
		loader := strings.TrimRight(string(text), "\x00")
		if err == nil && !filepath.IsAbs(loader) {
			err = errors.New("its loader has no absolute path")
		}
		return loader, err
	}
	return "", fmt.Errorf("%s: no loader: it is not dynamically linked", program)
}

// needed returns the names of what a file is linked to, and where it wants that
// looked for before anywhere else (DT_RUNPATH).
func needed(path string) (names, dirs []string, err error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	defer f.Close()
	if names, err = f.ImportedLibraries(); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	lists, err := f.DynString(elf.DT_RUNPATH)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	for _, list := range lists {
		dirs = append(dirs, filepath.SplitList(list)...)
	}
	return names, dirs, nil
}

func findLibrary(name string, dirs []string) (string, error) {
	for _, dir := range dirs {
		if path := filepath.Join(dir, name); name == filepath.Base(name) && filepath.IsAbs(dir) && exists(path) {
			return path, nil
		}
	}
	return "", fmt.Errorf("the host lacks %s: install its package (of kata-agent's: libc6, libseccomp2, libgcc-s1)", name)
}

// imageOf makes an ext4 image below dir that holds files as programs.
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
