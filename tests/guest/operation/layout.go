package operation

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/directvol/directvol/tests/guest/remote"
)

// layout says where blocks lie. A write that returns without an error is durable, unless the layout
// is unsynced. A read after the last block returns io.EOF.
type layout interface {
	io.Closer
	write(index uint64, block []byte) error
	read(index uint64, block []byte) (int, error)
}

func create(args remote.WriteBlocks) (layout, error) {
	if args.Apart {
		return filesApart{args.Path, args.Unsynced}, os.MkdirAll(args.Path, 0o755)
	}
	f, err := os.OpenFile(args.Path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	return oneFile{f, args.Unsynced}, err
}

func open(args remote.VerifyBlocks) (layout, error) {
	if args.Apart {
		_, err := os.Stat(args.Path)
		return filesApart{path: args.Path}, err
	}
	f, err := os.Open(args.Path)
	return oneFile{File: f}, err
}

// oneFile is a file with all blocks, one after the other.
type oneFile struct {
	*os.File
	unsynced bool
}

func (f oneFile) write(index uint64, block []byte) error {
	if _, err := f.WriteAt(block, int64(index)*int64(len(block))); err != nil || f.unsynced {
		return err
	}
	return f.Sync()
}

func (f oneFile) read(index uint64, block []byte) (int, error) {
	return f.ReadAt(block, int64(index)*int64(len(block)))
}

// filesApart is a directory with a file for each block, each in its own directory, because new
// directories make a filesystem use its new groups at once.
type filesApart struct {
	path     string
	unsynced bool
}

func (filesApart) Close() error { return nil }

func (d filesApart) of(index uint64) string {
	return filepath.Join(d.path, strconv.FormatUint(index, 10))
}

// write syncs the file, its name and its directory's name, in this order.
func (d filesApart) write(index uint64, block []byte) error {
	dir := d.of(index)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, "block"), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(block)
	if err == nil && !d.unsynced {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil || d.unsynced {
		return err
	}
	if err := syncDirectory(dir); err != nil {
		return err
	}
	return syncDirectory(d.path)
}

func (d filesApart) read(index uint64, block []byte) (int, error) {
	f, err := os.Open(filepath.Join(d.of(index), "block"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, io.EOF
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	n, err := io.ReadFull(f, block)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	return n, err
}

// syncDirectory makes the file's name durable.
func syncDirectory(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
