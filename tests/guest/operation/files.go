package operation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/guest/remote"
)

func readFile(_ context.Context, args remote.ReadFile) (remote.Data, error) {
	if args.Length < 0 || args.Length > remote.MaxData {
		return remote.Data{}, fmt.Errorf("read %s: length %d is outside 0 to %d", args.Path, args.Length, remote.MaxData)
	}
	f, err := os.Open(args.Path)
	if err != nil {
		return remote.Data{}, err
	}
	defer f.Close()
	// Read in small pieces, because /proc's files allocate memory for the whole length of a read.
	data, err := io.ReadAll(io.NewSectionReader(f, args.Offset, int64(args.Length)))
	return remote.Data{Data: data}, err
}

// writeFile writes all data in one write, because the kernel's own files accept a value only as a
// whole.
func writeFile(args remote.WriteFile) error {
	if len(args.Data) > remote.MaxData {
		return fmt.Errorf("write %s: %d bytes are more than %d", args.Path, len(args.Data), remote.MaxData)
	}
	flags := os.O_WRONLY | os.O_CREATE
	if args.Truncate {
		flags |= os.O_TRUNC
	}
	f, err := os.OpenFile(args.Path, flags, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(args.Data, args.Offset)
	return errors.Join(err, f.Close())
}

func stat(_ context.Context, args remote.Path) (remote.Stat, error) {
	var s unix.Stat_t
	if err := unix.Stat(args.Path, &s); err != nil {
		return remote.Stat{}, &os.PathError{Op: "stat", Path: args.Path, Err: err}
	}
	return remote.Stat{Dev: s.Dev, Ino: s.Ino, Mode: s.Mode, Nlink: uint64(s.Nlink), UID: s.Uid, GID: s.Gid, Rdev: s.Rdev, Size: s.Size}, nil
}

func mkdir(args remote.Mkdir) error {
	return os.MkdirAll(args.Path, os.FileMode(args.Mode).Perm())
}
