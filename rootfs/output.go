package rootfs

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// replaceFile replaces a file by the bytes that write produces, and returns their number. It writes
// a temporary file beside it, which replaces the file only when it is complete. After an error, or
// if ctx ends, the file is unchanged.
func replaceFile(ctx context.Context, file string, write func(io.Writer) (int64, error)) (int64, error) {
	// A device or a directory must not be replaced.
	if info, err := os.Lstat(file); err == nil && !info.Mode().IsRegular() {
		return 0, errors.New("it exists and is no regular file")
	}
	temp, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+"-*")
	if err != nil {
		return 0, err
	}
	defer os.Remove(temp.Name()) // fails after success, because the file was renamed
	defer temp.Close()
	buffered := bufio.NewWriterSize(contextWriter{ctx, temp}, 1<<20)
	n, err := write(buffered)
	if err != nil {
		return n, err
	}
	if err := buffered.Flush(); err != nil {
		return n, err
	}
	if err := temp.Chmod(0o644); err != nil {
		return n, err
	}
	if err := temp.Close(); err != nil {
		return n, err
	}
	return n, os.Rename(temp.Name(), file)
}

// hasFolder refuses a file whose directory does not exist, because a misspelt path must not be
// made.
func hasFolder(file string) error {
	dir := filepath.Dir(file)
	switch info, err := os.Stat(dir); {
	case err != nil:
		return fmt.Errorf("%s: its folder is missing: make it, or name another file (%w)", file, err)
	case !info.IsDir():
		return fmt.Errorf("%s: %s is no folder", file, dir)
	}
	return nil
}

// contextWriter fails writes after its context has ended.
type contextWriter struct {
	ctx context.Context
	w   io.Writer
}

func (c contextWriter) Write(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.w.Write(p)
}
