package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/output"
)

// makers format an image with the usual programs and their defaults.
var makers = map[string]struct {
	command []string
	deb     string // the Debian package of the program
}{
	"btrfs": {[]string{"mkfs.btrfs", "-q", "-f"}, "btrfs-progs"},
	"ext3":  {[]string{"mkfs.ext3", "-q", "-F"}, "e2fsprogs"},
	"ext4":  {[]string{"mkfs.ext4", "-q", "-F"}, "e2fsprogs"},
	"xfs":   {[]string{"mkfs.xfs", "-q", "-f"}, "xfsprogs"},
}

// Scratch makes a sparse image of bytes bytes below dir and formats it, with further options of
// mkfs if any are given. mkfs.xfs requires 300 MiB or more, mkfs.btrfs 109 MiB.
func Scratch(ctx context.Context, dir, fstype string, bytes int64, options ...string) (string, error) {
	maker, ok := makers[fstype]
	if !ok {
		return "", fmt.Errorf("no mkfs is known for %s", fstype)
	}
	if err := HasRoom(dir, uint64(bytes)); err != nil {
		return "", err
	}
	file, err := os.CreateTemp(dir, fstype+"-*.img")
	if err != nil {
		return "", err
	}
	defer file.Close()
	if err := file.Truncate(bytes); err != nil {
		return "", err
	}
	path, err := filepath.Abs(file.Name())
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, maker.command[0], slices.Concat(maker.command[1:], options, []string{path})...)
	out, err := cmd.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("%w: it is in the package %s", err, maker.deb)
	} else if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", maker.command[0], err, out)
	}
	return path, nil
}

// HasRoom refuses a folder on a full disk. A failed write to an image is a fault for the guest, and
// would be mistaken for a fault made on purpose.
func HasRoom(dir string, bytes uint64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("folder for the VM and its disks: %w: make it, or name another folder in TMPDIR", &os.PathError{Op: "statfs", Path: dir, Err: err})
	}
	if free := st.Bavail * uint64(st.Bsize); free < bytes {
		return fmt.Errorf("%s has %v free, and the disks may need %v: make room there, or name another folder in TMPDIR", dir, output.Size(free), output.Size(bytes))
	}
	return nil
}
