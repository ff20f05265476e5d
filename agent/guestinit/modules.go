package guestinit

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/modulelist"
)

// LoadModules loads the modules of a list (package modulelist), in its order. Nothing else in the
// guest loads them, as it has no modprobe. A missing list means an image whose kernel needs no
// modules.
func LoadModules(list string) error {
	others, err := LoadModulesUntil(list, "")
	return errors.Join(err, others())
}

// LoadModulesUntil loads the modules of a list up to and including the one called name, or all if
// name is not in the list. The function that it returns loads the others, and is never nil.
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
	paths, err := modulelist.Read(file)
	until := slices.IndexFunc(paths, func(p string) bool { return nameOf(p) == name }) + 1
	if until == 0 {
		until = len(paths)
	}
	return func() error { return loadAll(paths[until:]) }, errors.Join(err, loadAll(paths[:until]))
}

// loadAll continues after a module that fails, because another one may be the important one.
func loadAll(paths []string) error {
	var errs []error
	for _, p := range paths {
		errs = append(errs, LoadModule(p, ""))
	}
	return errors.Join(errs...)
}

// nameOf returns the name of the module in a file, which may be compressed.
func nameOf(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return name
}

// LoadModule loads a module from a file by finit_module(2), which decompresses the file if the
// kernel can. A module that is loaded already is left as it is.
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
