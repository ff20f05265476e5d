// Package fanotify receives the errors that filesystems report (FAN_FS_ERROR of fanotify(7), since
// Linux 5.16): ext4 reports them, and xfs since Linux 7.0. Other filesystems, and xfs before, can
// be added and report nothing.
//
// An added filesystem is not held: it can be unmounted, and its disk is free afterwards. The kernel
// merges the errors of a filesystem until they are read: an event has the first one and their
// number.
//
//	call    twice              late                    cut off           concurrent with its opposite
//	Add     changes nothing    later errors only       nothing is added  –
//	Follow  events are shared  the kernel keeps events the file is open  returns after Close
//	Close   fails, no effect   –                       –                 Add fails
package fanotify

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Group is one queue of the kernel's events, for all filesystems that were added to it.
type Group struct{ file *os.File }

// Event is an error of a filesystem.
type Event struct {
	Filesystem unix.Fsid  // as statfs returns it
	Errno      unix.Errno // of the first error
	Count      uint32     // of the errors since the last event
	OfFile     bool       // the first error is about one file, and not about the whole filesystem
	// Lost means that events were lost, of any filesystem. All other fields are zero.
	Lost bool
}

// Open returns an empty group. It needs CAP_SYS_ADMIN. The caller closes the group.
func Open() (*Group, error) {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_REPORT_FID|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY)
	if err != nil {
		return nil, os.NewSyscallError("fanotify_init", err)
	}
	return &Group{os.NewFile(uintptr(fd), "fanotify")}, nil
}

// Close closes the group and removes all filesystems from it.
func (g *Group) Close() error { return g.file.Close() }

// Add adds the filesystem that is mounted at path, and returns its ID. Before Linux 5.16 it returns
// EINVAL. Resolving the path may block, for instance at another filesystem's server.
func (g *Group) Add(path string) (unix.Fsid, error) {
	raw, err := g.file.SyscallConn()
	if err != nil {
		return unix.Fsid{}, err
	}
	var markErr error
	if err := raw.Control(func(fd uintptr) {
		markErr = unix.FanotifyMark(int(fd), unix.FAN_MARK_ADD|unix.FAN_MARK_FILESYSTEM, unix.FAN_FS_ERROR, unix.AT_FDCWD, path)
	}); err != nil {
		return unix.Fsid{}, err
	}
	if markErr != nil {
		return unix.Fsid{}, &fs.PathError{Op: "fanotify_mark", Path: path, Err: markErr}
	}
	var all unix.Statfs_t
	if err := unix.Statfs(path, &all); err != nil {
		return unix.Fsid{}, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return all.Fsid, nil
}

// readBytes has room for many events: one has less than 200 bytes.
const readBytes = 4096

// Follow calls each with every event until ctx ends.
func (g *Group) Follow(ctx context.Context, each func(Event)) error {
	defer context.AfterFunc(ctx, func() { g.file.SetReadDeadline(time.Unix(1, 0)) })()
	buf := make([]byte, readBytes)
	for {
		n, err := g.file.Read(buf)
		if err == nil {
			err = parse(buf[:n], each)
		}
		if err != nil {
			return errors.Join(ctx.Err(), err)
		}
	}
}

// Sizes and types of the kernel's include/uapi/linux/fanotify.h.
const (
	metadataBytes = 24 // struct fanotify_event_metadata
	headerBytes   = 4  // struct fanotify_event_info_header
	fidBytes      = 20 // struct fanotify_event_info_fid with an empty struct file_handle
	errorBytes    = 12 // struct fanotify_event_info_error

	infoFID   = 1 // FAN_EVENT_INFO_TYPE_FID
	infoError = 5 // FAN_EVENT_INFO_TYPE_ERROR
)

// parse calls each with every error in the bytes of one read. It skips other events, and records
// that it does not know.
func parse(b []byte, each func(Event)) error {
	for len(b) > 0 {
		if len(b) < metadataBytes {
			return fmt.Errorf("fanotify: %d bytes of an event's %d", len(b), metadataBytes)
		}
		length, start := binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint16(b[6:])
		if b[4] != unix.FANOTIFY_METADATA_VERSION {
			return fmt.Errorf("fanotify: version %d of events, not %d", b[4], unix.FANOTIFY_METADATA_VERSION)
		}
		if start < metadataBytes || length < uint32(start) || uint64(length) > uint64(len(b)) {
			return fmt.Errorf("fanotify: an event of %d bytes whose records begin at %d, in %d bytes", length, start, len(b))
		}
		switch mask := binary.NativeEndian.Uint64(b[8:]); {
		case mask&unix.FAN_Q_OVERFLOW != 0:
			each(Event{Lost: true})
		case mask&unix.FAN_FS_ERROR != 0:
			event, err := parseRecords(b[start:length])
			if err != nil {
				return err
			}
			each(event)
		}
		b = b[length:]
	}
	return nil
}

// parseRecords parses the information records of an event.
func parseRecords(b []byte) (event Event, err error) {
	for len(b) > 0 {
		if len(b) < headerBytes {
			return Event{}, fmt.Errorf("fanotify: %d bytes of a record's header", len(b))
		}
		kind, length := b[0], int(binary.NativeEndian.Uint16(b[2:]))
		least := map[byte]int{infoFID: fidBytes, infoError: errorBytes}[kind]
		if length < max(least, headerBytes) || length > len(b) {
			return Event{}, fmt.Errorf("fanotify: a record of type %d with %d bytes, in %d", kind, length, len(b))
		}
		i32 := func(at int) int32 { return int32(binary.NativeEndian.Uint32(b[at:])) }
		switch kind {
		case infoFID:
			event.Filesystem = unix.Fsid{Val: [2]int32{i32(4), i32(8)}}
			event.OfFile = i32(12) > 0 // handle_bytes
		case infoError:
			event.Errno, event.Count = errno(i32(4)), binary.NativeEndian.Uint32(b[8:])
		}
		b = b[length:]
	}
	return event, nil
}

// errno returns the error of a number. ext4 reports some as negative numbers.
func errno(n int32) unix.Errno {
	if n < 0 {
		n = -n
	}
	return unix.Errno(uint32(n))
}
