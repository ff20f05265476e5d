package guestinit

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// ModuleList is the image's list of modules: a path a line, in load order.
const ModuleList = "/etc/directvol/modules"

// LoadModules loads the modules of a list, which nothing else in the guest
// does: it has no modprobe. A list that is not there is an image whose kernel
// needs none.
func LoadModules(list string) error {
	others, err := LoadModulesUntil(list, "")
	return errors.Join(err, others())
}

// LoadModulesUntil loads the modules of a list up to one, by its file's name, or
// all where it is not among them. The others are loaded by the function that it
// returns, which is never nil.
func LoadModulesUntil(list, name string) (others func() error, err error) {
	nothing := func() error { return nil }
	file, err := os.Open(list)
	if errors.Is(err, fs.ErrNotExist) {
		return nothing, nil
	}
	if err != nil {
		return nothing, err
	}
	defer file.Close()
	var paths []string
	err = eachLine(file, func(line string) error {
		paths = append(paths, line)
		return nil
	})
	until := slices.IndexFunc(paths, func(p string) bool { return path.Base(p) == name }) + 1
	if until == 0 {
		until = len(paths)
	}
	return func() error { return loadAll(paths[until:]) }, errors.Join(err, loadAll(paths[:until]))
}

// loadAll goes on after one that fails: another may be the one that matters.
func loadAll(paths []string) error {
	var errs []error
	for _, p := range paths {
		errs = append(errs, LoadModule(p, ""))
	}
	return errors.Join(errs...)
}

func eachLine(r io.Reader, do func(line string) error) error {
	var errs []error
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if line := lines.Text(); line != "" {
			errs = append(errs, do(line))
		}
	}
	return errors.Join(append(errs, lines.Err())...)
}

// LoadModule loads a module from a file, by finit_module(2), which decompresses by
// itself where the kernel can. One that is there already is left as it is.
func LoadModule(path, parameters string) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("module: %w", err)
	}
	defer file.Close()
	flags := 0
	if filepath.Ext(path) != ".ko" {
		flags = unix.MODULE_INIT_COMPRESSED_FILE
	}
	if err := unix.FinitModule(int(file.Fd()), parameters, flags); err != nil && !errors.Is(err, unix.EEXIST) {
		return &fs.PathError{Op: "finit_module", Path: path, Err: err}
	}
	return nil
}
