// Package state keeps what an agent must know after its own restart in one file, for one boot: an
// agent that runs as a service writes the file, and the next agent of the same boot reads it. The
// package knows the file but not its contents.
//
//	a second agent of the same file   is refused as long as the first one lives
//	killed while it saves             the file is as before, or complete
//	after a reboot                    there is nothing to read
//	another version's file            is read as far as its fields are known (Rest)
//	a file that makes no sense        is an error; Aside keeps a copy
package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// File is a state file. It belongs on a tmpfs, because it is useless after a reboot.
type File struct {
	path string
	boot string   // the id of this boot: device numbers mean nothing in another one
	lock *os.File // held as long as this agent lives

	mu     sync.Mutex // one save at a time, with all changes before it
	closed bool
}

// Header begins the contents of every File. A type that embeds it can be saved and read.
type Header struct {
	// Version counts the additions to the contents, from 1. Any version can be read.
	Version int    `json:"version"`
	Boot    string `json:"boot_id"`
}

// bootID is the file with the kernel's id of this boot (random(4)).
const bootID = "/proc/sys/kernel/random/boot_id"

// maxBytes is more than the storages of any sandbox need.
const maxBytes = 16 << 20

// Open returns the File at path, and makes its directory. The file belongs to this agent alone
// until Close or the end of the process; a file that another agent has opened is refused.
func Open(path string) (*File, error) {
	boot, err := os.ReadFile(bootID)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("state %s: it exists and is not a regular file: name another one", path)
	}
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("state %s: another agent uses it: give this agent its own: %w", path, err)
	}
	return &File{path: path, boot: strings.TrimSpace(string(boot)), lock: lock}, nil
}

// Path returns the path of the file.
func (f *File) Path() string { return f.path }

// Close releases the file for another agent, as the end of the process does, and waits for a Save
// in progress. The process may end later than Close: it does not end while a disk that hangs blocks
// one of its threads. Closing a nil File does nothing.
func (f *File) Close() error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	return f.lock.Close()
}

// Header returns the header of contents of a version that are saved now.
func (f *File) Header(version int) Header { return Header{version, f.boot} }

// Save replaces the file, completely or not at all, by the result of contents: a value with a
// Header, encoded as JSON. contents is called after earlier saves have ended, so that the later of
// two saves has the later contents. After Close, Save writes nothing and returns fs.ErrClosed.
func (f *File) Save(contents func() any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return fmt.Errorf("state %s: %w", f.path, fs.ErrClosed)
	}
	text, err := json.Marshal(contents())
	if err != nil {
		return fmt.Errorf("state: %w", err)
	}
	if err := f.write(text); err != nil {
		return fmt.Errorf("state: %w", err)
	}
	return nil
}

func (f *File) write(text []byte) error {
	if len(text) > maxBytes {
		return fmt.Errorf("%d bytes: at most %d can be read back", len(text), maxBytes)
	}
	next := f.path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	file, err := os.OpenFile(next, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) // does not follow a link
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	return os.Rename(next, f.path)
}

// Read decodes the file into contents, a pointer to a value with a Header. It returns false if
// there is no file, or one of another boot. If it returns false or an error, contents may hold
// anything.
func (f *File) Read(contents any) (found bool, err error) {
	file, err := os.Open(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxBytes+1))
	if err != nil {
		return false, err
	}
	return parse(text, f.boot, contents)
}

func parse(text []byte, boot string, contents any) (found bool, err error) {
	if len(text) > maxBytes {
		return false, fmt.Errorf("more than %d bytes", maxBytes)
	}
	var header Header
	if err := json.Unmarshal(text, contents); err != nil {
		return false, err
	}
	if err := json.Unmarshal(text, &header); err != nil {
		return false, err
	}
	if header.Version < 1 {
		return false, fmt.Errorf("version %d: want 1 or more", header.Version)
	}
	if header.Boot == "" {
		return false, errors.New("no boot_id")
	}
	return header.Boot == boot, nil
}

// Aside keeps a copy of the file for people to read, and returns the copy's path. An existing copy
// stays, because it has the state from before an agent wrote the file again.
func (f *File) Aside() (path string, err error) {
	path = f.path + ".bad"
	if err = os.Link(f.path, path); errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return path, err
}
