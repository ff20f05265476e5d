// Package xfsmonitor reads the events of xfs's health monitor (XFS_IOC_HEALTH_MONITOR, since Linux
// 7.0; struct xfs_health_monitor_event in fs/xfs/libxfs/xfs_fs.h). It reports failed reads and
// writes of files, damage, a shutdown and the unmounting; an error of the log causes no event.
//
// A monitor does not hold its filesystem: it ends with it.
//
//	call    twice            late                   cut off                  concurrent with its opposite
//	Open    two monitors     later events only      nothing is left          –
//	Follow  share the events the kernel keeps some  the next one goes on     Close ends it
//	Close   fails            –                      –                        ends Follow
package xfsmonitor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrUnsupported means that the kernel or the filesystem has no health monitor.
var ErrUnsupported = errors.New("it has no health monitor")

// Monitor is an open monitor of one filesystem.
type Monitor struct{ file *os.File }

// Event is one event.
type Event struct {
	Type  Type
	Errno unix.Errno // of a failed read or write of a file; else 0
}

// Type is the type of an event.
type Type uint32

// The types of events.
const (
	Running Type = iota
	Lost         // events were lost
	Unmounted
	Sick
	Corrupt
	Healthy
	Shutdown
	MediaError
	BufferedRead // and the next three: a read or write of a file has failed
	BufferedWrite
	DirectRead
	DirectWrite
	DataLost
)

var names = []string{"running", "events were lost", "unmounted", "sick", "corrupt", "healthy", "shut down", "media error",
	"a buffered read failed", "a buffered write failed", "a direct read failed", "a direct write failed", "data of a file is lost"}

// String describes an event.
func (e Event) String() string {
	text := fmt.Sprintf("event %d", e.Type)
	if int(e.Type) < len(names) {
		text = names[e.Type]
	}
	if e.Errno != 0 {
		text += ": " + e.Errno.Error()
	}
	return text
}

// request is struct xfs_health_monitor.
type request struct {
	flags  uint64
	format uint8
	_      [23]uint8
}

// ioctlMonitor is XFS_IOC_HEALTH_MONITOR, _IOW('X', 68, struct xfs_health_monitor).
const ioctlMonitor = 0x40205844

// Open opens the monitor of the xfs whose root directory is open. It needs CAP_SYS_ADMIN. The error
// is ErrUnsupported for another filesystem, and before Linux 7.0. The caller closes the monitor,
// and may close the directory at once.
func Open(root *os.File) (*Monitor, error) {
	raw, err := root.SyscallConn()
	if err != nil {
		return nil, err
	}
	var number uintptr
	var errno unix.Errno
	if err := raw.Control(func(fd uintptr) {
		var asked request
		number, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, ioctlMonitor, uintptr(unsafe.Pointer(&asked)))
	}); err != nil {
		return nil, err
	}
	switch errno {
	case 0:
	case unix.ENOTTY, unix.EOPNOTSUPP, unix.EINVAL:
		return nil, fmt.Errorf("%s: %w (%w)", root.Name(), ErrUnsupported, errno)
	default:
		return nil, &os.PathError{Op: "XFS_IOC_HEALTH_MONITOR", Path: root.Name(), Err: errno}
	}
	unix.CloseOnExec(int(number))
	if err := unix.SetNonblock(int(number), true); err != nil {
		unix.Close(int(number))
		return nil, os.NewSyscallError("fcntl", err)
	}
	file := os.NewFile(number, "xfs health monitor of "+root.Name())
	if err := file.SetReadDeadline(time.Time{}); err != nil { // a reader would keep a thread
		file.Close()
		return nil, fmt.Errorf("%s cannot be polled: %w", file.Name(), err)
	}
	return &Monitor{file}, nil
}

// Close closes the monitor, and ends Follow.
func (m *Monitor) Close() error { return m.file.Close() }

const (
	eventBytes = 64
	readBytes  = 64 * eventBytes
)

// Follow calls each with every event until the filesystem is unmounted or the monitor is closed. It
// returns nil in these cases.
func (m *Monitor) Follow(each func(Event)) error {
	buf := make([]byte, readBytes)
	for ended := false; !ended; {
		n, err := m.file.Read(buf)
		if errors.Is(err, io.EOF) || errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err == nil {
			err = parse(buf[:n], func(e Event) {
				ended = ended || e.Type == Unmounted
				each(e)
			})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// fileDomain is the domain of events about a range of a file.
const fileDomain = 8

// parse calls each with every event in the bytes of one read.
func parse(b []byte, each func(Event)) error {
	if len(b)%eventBytes != 0 {
		return fmt.Errorf("xfs health monitor: %d bytes are no whole events of %d", len(b), eventBytes)
	}
	for ; len(b) > 0; b = b[eventBytes:] {
		e := Event{Type: Type(binary.NativeEndian.Uint32(b[4:]))}
		if binary.NativeEndian.Uint32(b) == fileDomain {
			e.Errno = errno(int32(binary.NativeEndian.Uint32(b[44:]))) // struct …_filerange begins at 16
		}
		each(e)
	}
	return nil
}

// errno returns the error of a number, whatever its sign.
func errno(n int32) unix.Errno {
	if n < 0 {
		n = -n
	}
	return unix.Errno(uint32(n))
}
