package storage

import (
	"context"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
)

// local is a directory of the guest's own filesystem: an emptyDir. Its files outlive its holders,
// as they may be needed by the next container; an empty directory is removed.
var local = &driver{
	name: "local",
	check: func(r request) error {
		if err := checkGroupOption(r); err != nil {
			return err
		}
		_, _, err := localMode(r)
		return err
	},
	find: named,
	mount: func(_ context.Context, _ *devices, r request, _ origin) (did, error) {
		made, err := makeMountPoint(r.mountPoint)
		if err != nil {
			return did{}, err
		}
		mode, given, err := localMode(r)
		if err == nil && given {
			err = unix.Chmod(r.mountPoint, mode)
		}
		if err == nil {
			return did{made: made}, nil
		}
		if made {
			os.Remove(r.mountPoint)
		}
		return did{}, &fs.PathError{Op: "chmod", Path: r.mountPoint, Err: err}
	},
	unmount: func(m *mounted) error {
		if m.made {
			os.Remove(m.mountPoint) // fails if the directory is not empty, as intended
		}
		return nil
	},
	there: func(m *mounted) (bool, error) {
		info, err := os.Lstat(m.mountPoint)
		return err == nil && info.IsDir(), nil
	},
}

// localMode parses the directory's mode, which is the only option.
func localMode(r request) (mode uint32, given bool, err error) {
	if r.options.Flags == 0 && r.options.Data == "" {
		return 0, false, nil
	}
	text, ok := strings.CutPrefix(r.options.Data, "mode=")
	bits, err := strconv.ParseUint(text, 8, 12)
	if r.options.Flags != 0 || !ok || err != nil {
		return 0, false, errkind.New(errkind.InvalidArgument, "options %.80q: driver local has mode=, in octal and up to 7777, and no other", r.options.Data)
	}
	return uint32(bits), true, nil
}
