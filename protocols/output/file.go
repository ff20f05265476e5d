package output

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// WriteFile writes a file for other programs, with mode 0644. A regular file is replaced as
// ReplaceFile does it; anything else, such as a device or a link, is written to in its place.
func WriteFile(file string, data []byte) error {
	if info, err := os.Lstat(file); err == nil && !info.Mode().IsRegular() {
		return os.WriteFile(file, data, 0o644)
	}
	_, err := ReplaceFile(file, func(w io.Writer) (int64, error) {
		n, err := w.Write(data)
		return int64(n), err
	})
	return err
}

// ReplaceFile replaces a file by the bytes that write produces, and returns their number. It writes
// a temporary file beside it, which replaces the file only when it is complete: after an error,
// such as that of a full disk, the file is unchanged. Anything but a regular file is refused.
func ReplaceFile(file string, write func(io.Writer) (int64, error)) (n int64, err error) {
	if info, err := os.Lstat(file); err == nil && !info.Mode().IsRegular() {
		return 0, errors.New("it exists and is not a regular file")
	}
	temp, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+"-*")
	if err != nil {
		return 0, named(file, err)
	}
	defer os.Remove(temp.Name()) // fails after success, because the file was renamed
	defer temp.Close()
	buffered := bufio.NewWriterSize(temp, 1<<20)
	if n, err = write(buffered); err != nil {
		return n, named(file, err)
	}
	if err := errors.Join(buffered.Flush(), temp.Chmod(0o644), temp.Close()); err != nil {
		return n, named(file, err)
	}
	return n, os.Rename(temp.Name(), file)
}

// named gives an error of the temporary file the name of the file.
func named(file string, err error) error {
	if failed, ok := errors.AsType[*fs.PathError](err); ok {
		return &fs.PathError{Op: failed.Op, Path: file, Err: failed.Err}
	}
	return err
}
