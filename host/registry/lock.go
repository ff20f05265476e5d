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

// Bytes of a lock file; the package comment has the table.
const (
	readsAll = iota
	writesAll
	readsPart
	writesPart
	uses
)

// excludes returns the bytes of the uses that cannot be beside a use.
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

// Lock is a store's lock files, held.
type Lock struct{ files []*os.File }

// Lock holds the lock files of a disk that is open already, for those who write it without a sandbox. It fails as Claim does.
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

// makeDir makes the directory, or refuses one that is not this user's alone, or that another can replace: a lock file that another
// removes locks nothing.
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
		return fmt.Errorf("directory of the stores' locks %s: want one that is yours with mode 0700, or none yet: remove it when no sandbox runs", s.dir)
	}
	return checkAbove(s.dir)
}

// checkAbove refuses a directory that somebody but this user and root can move away, which takes the right to write a directory
// above it: of those that many may write, sticky ones keep a name for its owner. Below a directory that nobody else may enter all
// is this user's.
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
				return fmt.Errorf("directory of the stores' locks %s: others can replace it, as they own or may write %s: remove that, or take that right away", dir, above)
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

// errHeld is the failure to take a lock that somebody excludes.
var errHeld = errors.New("held by another")

// take opens a lock file and locks the byte of a use. With errHeld the file is returned too, for what it says.
func take(path string, use int) (*os.File, error) {
	for {
		// A sticky file is left alone by what cleans /tmp of old files (tmpfiles.d(5)).
		file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600|os.ModeSticky)
		if err != nil {
			return nil, fmt.Errorf("lock of a store: %w", err)
		}
		if err := lockByte(file, use); err != nil {
			return file, err
		}
		// Whoever releases a lock removes its file: then this one locks nothing.
		if there, err := hasName(file); there || err != nil {
			return file, err
		}
		file.Close()
	}
}

// hasName reports whether a lock file was not removed.
func hasName(file *os.File) (bool, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(file.Fd()), &st)
	return st.Nlink > 0, err
}

// lockByte locks first and looks then, so that of two who come at once one at least is refused.
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

// Release gives the locks up. A lock file that nobody else has is removed. One that was removed before, by who had it then, may have
// a successor of its name that another has by now.
func (l *Lock) Release() {
	for _, file := range l.files {
		if unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: uses}) == nil {
			if there, err := hasName(file); there && err == nil { // and nobody else removes it now
				os.Remove(file.Name())
			}
		}
		// Closing alone would leave the lock to a process that another goroutine begins: it has a copy of the descriptor for a moment.
		_ = unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK})
		file.Close()
	}
	l.files = nil
}

// record is what a lock file says of who has taken it last.
type record struct {
	PID      int    `json:"pid"`
	Owner    string `json:"owner"`
	Path     string `json:"path"`
	ReadOnly bool   `json:"read_only"`
}

// maxRecord is more than any record has: a path has 4096 bytes at most (PATH_MAX), and six for each in JSON.
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

// holderIn reads who has a lock. Where the file says nothing yet, its owner is only just taking it.
func holderIn(file *os.File) holders.Holder {
	text := make([]byte, maxRecord)
	n, _ := file.ReadAt(text, 0) // it is shorter
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
		return holders.Holder{How: "another process of this user has it"}
	}
	how := "has it for " + holders.Printable(r.Owner) + ", as " + holders.Printable(r.Path)
	if r.ReadOnly {
		how = "reads it for " + holders.Printable(r.Owner) + ", as " + holders.Printable(r.Path) + ", perhaps with others"
	}
	return holders.Holder{PID: max(r.PID, 0), How: how}
}
