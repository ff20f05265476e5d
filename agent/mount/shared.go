package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// shared is the last reading of mountinfo that Now has made.
var shared reading

// Now returns the mounts of this process's namespace: each mount's ID, parent, mount point, root,
// device and own options are as they are now. It reads mountinfo only if a mount was made, moved,
// unmounted or remounted since the last call, so that many callers share one reading. The kernel
// announces neither that a filesystem has changed its options by itself, nor that a directory above
// a mount point was renamed: Reread shows these, and a caller that acts on a path looks at the path
// itself (Look), too.
func Now() (*List, error) { return shared.now() }

// Reread is Now with a new reading of mountinfo, whether a mount has changed or not.
func Reread() (*List, error) {
	all, err := All()
	if err != nil {
		return nil, err
	}
	return ListOf(all), nil
}

// reading is a file that was read, and its contents. The kernel counts the changes of a namespace's
// mounts before each ends (touch_mnt_namespace in fs/namespace.c). poll compares that count with
// the one when the file was opened, or polled for the last time (mounts_poll in
// fs/proc_namespace.c). So the contents are current as long as poll reports no event, however late
// this process runs.
//
// The file is not one of package os, whose poller would take the events.
type reading struct {
	mu    sync.Mutex
	fd    int // of a mountinfo, if list is not nil
	list  *List
	lines map[string]*Info // of the last reading: most lines stay the same
	bytes int              // the length of its text
}

func (r *reading) now() (*List, error) {
	own := ownNamespace()
	r.mu.Lock()
	defer r.mu.Unlock()
	if home == (namespace{}) { // /proc was not mounted when the process began
		home = own
	}
	if own != home || own == (namespace{}) {
		return Reread()
	}
	if r.list != nil {
		if !hasChanged(r.fd) {
			return r.list, nil
		}
		unix.Close(r.fd)
		r.list = nil
	}
	fd, err := unix.Open("/proc/thread-self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	text, err := readFrom(fd, r.bytes)
	r.bytes = len(text)
	var all []*Info
	if err == nil {
		all, err = r.parse(text)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	r.fd, r.list = fd, ListOf(all)
	return r.list, nil
}

// parse is Read, but for lines that the last text had, too.
func (r *reading) parse(text string) (all []*Info, err error) {
	var added []string
	for line := range strings.Lines(text) {
		if r.lines[line] == nil {
			added = append(added, line)
		}
	}
	parsed, err := Read(strings.NewReader(strings.Join(added, "")))
	if err == nil && len(parsed) != len(added) {
		err = fmt.Errorf("mountinfo: %d mounts in %d lines", len(parsed), len(added))
	}
	if err != nil {
		return nil, err
	}
	now := make(map[string]*Info, len(r.lines)+len(added))
	all = make([]*Info, 0, len(r.lines)+len(added))
	for line := range strings.Lines(text) {
		m := r.lines[line]
		if m == nil {
			m, parsed = parsed[0], parsed[1:]
		}
		now[line] = m
		all = append(all, m)
	}
	r.lines = now
	return all, nil
}

// namespace identifies a mount namespace while somebody uses it.
type namespace struct{ device, inode uint64 }

// home is the namespace that the process began in, the only one whose readings are shared: a file
// that is kept open would hold the mounts of a namespace that a test's thread made and left. It is
// guarded by shared.mu.
var home = ownNamespace()

// ownNamespace returns the namespace of the calling thread. It is zero if it cannot be read.
func ownNamespace() namespace {
	var st unix.Stat_t
	if unix.Stat("/proc/thread-self/ns/mnt", &st) != nil {
		return namespace{}
	}
	return namespace{st.Dev, st.Ino}
}

// hasChanged reports whether the mounts have changed since the file was opened, or since hasChanged
// was last called.
func hasChanged(mountinfo int) bool {
	polled := []unix.PollFd{{Fd: int32(mountinfo), Events: unix.POLLPRI}}
	n, err := unix.Poll(polled, 0)
	return err != nil || n > 0
}

// readFrom returns the text of an open mountinfo, which probably has about as many bytes as
// expected.
func readFrom(mountinfo, expected int) (string, error) {
	var text strings.Builder
	text.Grow(expected + readBytes)
	buf := make([]byte, readBytes)
	for {
		n, err := unix.Read(mountinfo, buf)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return "", &fs.PathError{Op: "read", Path: "mountinfo", Err: err}
		case n == 0:
			return text.String(), nil
		default:
			text.Write(buf[:n])
		}
	}
}

// readBytes is what the kernel fills at once (seq_read_iter in fs/seq_file.c).
const readBytes = 4096
