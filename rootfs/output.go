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

// replaceFile gives file the bytes that write produces, and returns how many. They go to a temporary file beside it that
// takes its place only when it is whole: on an error, or when ctx ends, file is as it was.
func replaceFile(ctx context.Context, file string, write func(io.Writer) (int64, error)) (int64, error) {
	// A device or a folder is not what anyone wants replaced.
	if info, err := os.Lstat(file); err == nil && !info.Mode().IsRegular() {
		return 0, errors.New("it exists and is no regular file")
	}
	temp, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+"-*")
	if err != nil {
		return 0, err
	}
	defer os.Remove(temp.Name()) // gone already where all went well
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

// hasFolder refuses a file whose folder is not there: a path that is misspelt must not become one.
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

// contextWriter refuses to write once its context has ended.
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
