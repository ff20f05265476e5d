package filesystem

import (
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// noCheckpoint is the Checkpoint of a filesystem that keeps its log if a write of an unmount fails.
func noCheckpoint(*os.File) error { return nil }

// ioctlCheckpoint is EXT4_IOC_CHECKPOINT, _IOW('f', 43, __u32), of Linux 5.14
// (Documentation/filesystems/ext4/journal.rst). The argument is a set of flags.
const ioctlCheckpoint = 0x4004662b

// ext4Checkpoint writes the journal back. If a block takes no write, the kernel aborts the journal.
// Without this call it finds that in the unmount, and there 6.1 clears the superblock's
// needs_recovery although it keeps the journal's start (ext4_put_super in fs/ext4/super.c): the
// next mount discards the journal, and with it what only the journal has. After an abort before the
// unmount, needs_recovery stays, and the next mount replays the journal.
func ext4Checkpoint(dir *os.File) error {
	var flags uint32
	err := ioctl(Mounted{Dir: dir}, "EXT4_IOC_CHECKPOINT", ioctlCheckpoint, unsafe.Pointer(&flags))
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV) { // an older kernel, or no journal
		return nil
	}
	return err
}
