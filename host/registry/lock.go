package registry

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/holders"
)

// Bytes of a lock file; see the table in the package comment.
const (
	readsAll = iota
	writesAll
	readsPart
	writesPart
	uses
)

// excludes returns the bytes of those uses that exclude a use.
func excludes(use int) []int {
	switch use {
	case readsAll:
		return []int{writesAll, writesPart}
	case readsPart:
		return []int{writesAll}
	case writesPart:
		return []int{readsAll, writesAll}
	default:
		return []int{readsAll, writesAll, readsPart, writesPart}
	}
}

// Lock holds the lock files of a store.
type Lock struct{ files []*os.File }

// Lock locks the lock files of an open disk, for a program that writes the disk without a sandbox.
// It fails as Claim does.
func (s *Stores) Lock(disk *os.File, owner string) (*Lock, error) {
	layers, _, err := holders.Layers(disk)
	if err != nil {
		return nil, err
	}
	return s.lock(disk.Name(), layers, owner, false)
}

func (s *Stores) lock(path string, layers []holders.Layer, owner string, readOnly bool) (*Lock, error) {
	if err := s.makeDir(); err != nil {
		return nil, err
	}
	l := &Lock{}
	mine := record{PID: os.Getpid(), Owner: owner, Path: path, ReadOnly: readOnly}
	for _, layer := range layers {
		use := writesAll
		if readOnly {
			use = readsAll
		}
		if layer.Part {
			use += readsPart - readsAll
		}
		file, err := take(filepath.Join(s.dir, layer.Key), use)
		if file != nil {
			l.files = append(l.files, file)
		}
		if errors.Is(err, errHeld) {
			err = &holders.InUseError{Disk: path, Holders: []holders.Holder{holderIn(file)}}
		}
		if err == nil {
			err = mine.write(file)
		}
		if err != nil {
			l.Release()
			return nil, err
		}
	}
	return l, nil
}

// makeDir makes the directory. It refuses an existing one that other users may enter or could
// replace, because a lock file that another user can remove locks nothing.
func (s *Stores) makeDir() error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return fmt.Errorf("directory of the stores' locks: %w", err)
	}
	info, err := os.Lstat(s.dir)
	if err != nil {
		return fmt.Errorf("directory of the stores' locks: %w", err)
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || info.Mode().Perm()&0o077 != 0 || !ok || int(owner.Uid) != os.Geteuid() {
		return fmt.Errorf("directory of the stores' locks %s: want a directory that you own with mode 0700, or a path that does not exist yet: remove it when no sandbox runs", s.dir)
	}
	return checkAbove(s.dir)
}

// checkAbove refuses a directory that users other than this user and root could move away. Moving
// the directory away requires the right to write a directory above it; a sticky directory that many
// may write still protects each owner's names. The check ends at a directory of this user that
// nobody else may enter: everything below it is this user's.
func checkAbove(dir string) error {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return fmt.Errorf("directory of the stores' locks: %w", err)
	}
	for _, path := range []string{dir, real} {
		for above := range ancestors(path) {
			info, err := os.Lstat(above)
			if err != nil {
				return fmt.Errorf("directory of the stores' locks: %w", err)
			}
			st, ok := info.Sys().(*syscall.Stat_t)
			private := info.IsDir() && info.Mode().Perm()&0o077 == 0
			shared := info.IsDir() && info.Mode().Perm()&0o022 != 0 && info.Mode()&os.ModeSticky == 0
			if !ok || st.Uid != 0 && int(st.Uid) != os.Geteuid() || shared {
				return fmt.Errorf("directory of the stores' locks %s: other users can replace it, because they own or may write %s: remove that, or change its owner or mode", dir, above)
			}
			if private && int(st.Uid) == os.Geteuid() {
				break
			}
		}
	}
	return nil
}

// ancestors yields the directories above an absolute path, from the root down.
func ancestors(path string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for i := range len(path) {
			if path[i] == '/' && !yield(path[:max(i, 1)]) {
				return
			}
		}
	}
}

// errHeld means that a lock is excluded by another lock.
var errHeld = errors.New("held by another")

// take opens a lock file and locks the byte for a use. If the error is errHeld, take also returns
// the file, for its record.
func take(path string, use int) (*os.File, error) {
	for {
		// Programs that remove old files from /tmp spare sticky files (tmpfiles.d(5)).
		file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600|os.ModeSticky)
		if err != nil {
			return nil, fmt.Errorf("lock of a store: %w", err)
		}
		if err := lockByte(file, use); err != nil {
			return file, err
		}
		// The previous holder removes the file on release. If the file was removed, the lock is
		// void and take tries again.
		if there, err := hasName(file); there || err != nil {
			return file, err
		}
		file.Close()
	}
}

// hasName reports whether a lock file still has a name, so was not removed.
func hasName(file *os.File) (bool, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(file.Fd()), &st)
	return st.Nlink > 0, err
}

// lockByte locks the byte of a use and then checks for uses that exclude it. Because of this order,
// at least one of two concurrent callers is refused.
func lockByte(file *os.File, use int) error {
	kind := int16(unix.F_RDLCK)
	if use == writesAll {
		kind = unix.F_WRLCK
	}
	err := unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind, Start: int64(use), Len: 1})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return errHeld
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", file.Name(), err)
	}
	for _, other := range excludes(use) {
		lock := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(other), Len: 1}
		if err := unix.FcntlFlock(file.Fd(), unix.F_OFD_GETLK, &lock); err != nil {
			return fmt.Errorf("lock %s: %w", file.Name(), err)
		}
		if lock.Type != unix.F_UNLCK {
			return errHeld
		}
	}
	return nil
}

// Release releases the locks, and removes each lock file that no other process uses. A file that
// was removed before by its other holder is left alone: another file, with another holder, may have
// its name by now.
func (l *Lock) Release() {
	for _, file := range l.files {
		if unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: uses}) == nil {
			if there, err := hasName(file); there && err == nil { // nobody else can remove the file now
				os.Remove(file.Name())
			}
		}
		// Closing is not enough: a process that another goroutine is starting briefly has a copy of
		// the descriptor, and would keep the lock.
		_ = unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK})
		file.Close()
	}
	l.files = nil
}

// record is the content of a lock file: its last holder.
type record struct {
	PID      int    `json:"pid"`
	Owner    string `json:"owner"`
	Path     string `json:"path"`
	ReadOnly bool   `json:"read_only"`
}

// maxRecord exceeds the length of any record: a path has at most 4096 bytes (PATH_MAX), and each
// takes at most six in JSON.
const maxRecord = 32 << 10

func (r record) write(file *os.File) error {
	text, err := json.Marshal(r)
	if err == nil {
		err = file.Truncate(0)
	}
	if err == nil {
		_, err = file.WriteAt(append(text, '\n'), 0)
	}
	if err != nil {
		return fmt.Errorf("lock of a store: %w", err)
	}
	return nil
}

// holderIn reads the holder from a lock file. If the file has no record yet, its owner is just
// taking the lock.
func holderIn(file *os.File) holders.Holder {
	text := make([]byte, maxRecord)
	n, _ := file.ReadAt(text, 0) // EOF is expected: the record is shorter
	return parse(text[:n]).holder()
}

func parse(text []byte) record {
	var r record
	if json.Unmarshal(text, &r) != nil {
		return record{}
	}
	return r
}

func (r record) holder() holders.Holder {
	if r.Owner == "" {
		return holders.Holder{How: "another process of this user uses it"}
	}
	how := "has it for " + holders.Printable(r.Owner) + ", as " + holders.Printable(r.Path)
	if r.ReadOnly {
		how = "reads it for " + holders.Printable(r.Owner) + ", as " + holders.Printable(r.Path) + ", perhaps with others"
	}
	return holders.Holder{PID: max(r.PID, 0), How: how}
}
