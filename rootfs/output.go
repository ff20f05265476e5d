package rootfs

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/directvol/directvol/protocols/output"
)

// replaceFile replaces a file as output.ReplaceFile does it. After an error, or if ctx ends, the
// file is unchanged.
func replaceFile(ctx context.Context, file string, write func(io.Writer) (int64, error)) (int64, error) {
	return output.ReplaceFile(file, func(w io.Writer) (int64, error) {
		return write(contextWriter{ctx, w})
	})
}

// canReplace refuses a file that replaceFile would refuse, and one whose directory does not exist,
// because a misspelt path must not be made.
func canReplace(file string) error {
	if info, err := os.Lstat(file); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%s exists and is not a regular file: name another file", file)
	}
	dir := filepath.Dir(file)
	switch info, err := os.Stat(dir); {
	case err != nil:
		return fmt.Errorf("%s: its folder is missing: make it, or name another file (%w)", file, err)
	case !info.IsDir():
		return fmt.Errorf("%s: %s is not a folder", file, dir)
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
