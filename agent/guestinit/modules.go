package guestinit

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// ModuleList is the image's list of modules: a path a line, in load order.
const ModuleList = "/etc/directvol/modules"

// LoadModules loads the modules of a list, which nothing else in the guest
// does: it has no modprobe. A list that is not there is an image whose kernel
// needs none.
func LoadModules(list string) error {
	file, err := os.Open(list)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	return eachLine(file, loadModule)
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

func loadModule(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("module: %w", err)
	}
	defer file.Close()
	if err := unix.FinitModule(int(file.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return &fs.PathError{Op: "finit_module", Path: path, Err: err}
	}
	return nil
}
