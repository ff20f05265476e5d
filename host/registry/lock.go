package registry

import (
	"encoding/json"
	"errors"
	"fmt"
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

// makeDir makes the directory, or refuses one that is not this user's alone: a lock file that another removes locks nothing.
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
	return nil
}

// errHeld is the failure to take a lock that somebody excludes.
var errHeld = errors.New("held by another")

// take opens a lock file and locks the byte of a use. With errHeld the file is returned too, for what it says.
func take(path string, use int) (*os.File, error) {
	for {
		file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock of a store: %w", err)
		}
		if err := lockByte(file, use); err != nil {
			return file, err
		}
		// Whoever releases a lock removes its file: then this one locks nothing.
		var st unix.Stat_t
		if err := unix.Fstat(int(file.Fd()), &st); err != nil || st.Nlink > 0 {
			return file, err
		}
		file.Close()
	}
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

// Release gives the locks up. A lock file that nobody else has is removed.
func (l *Lock) Release() {
	for _, file := range l.files {
		if unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: uses}) == nil {
			os.Remove(file.Name())
		}
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
