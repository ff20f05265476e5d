package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"
)

// PathBytes is the longest path: PATH_MAX without the final NUL.
const PathBytes = 4095

// IsPoint reports whether a path is clean, absolute, below / and UTF-8. Other encodings could be
// represented neither in a message nor in JSON.
func IsPoint(path string) bool {
	return utf8.ValidString(path) && filepath.IsAbs(path) && path == filepath.Clean(path) && path != "/" && len(path) <= PathBytes && !strings.ContainsRune(path, 0)
}

// MakePoint makes the directory if it does not exist. It refuses a path that leads through a
// symbolic link: mountinfo would show the mount with another path, and At would not find it. After
// an error no directory is left at the path.
func MakePoint(path string) (made bool, err error) {
	refuse := func(format string, args ...any) (bool, error) {
		if made {
			os.Remove(path)
		}
		return false, fmt.Errorf("mount point: "+format, args...)
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return refuse("%w", err)
		}
		made = true
	} else if err != nil {
		return refuse("%w", err)
	} else if !info.IsDir() {
		return refuse("%s is not a directory", path)
	}
	switch real, err := filepath.EvalSymlinks(path); {
	case err != nil:
		return refuse("%w", err)
	case real != path:
		return refuse("%s leads through a symbolic link to %s: use that path", path, real)
	}
	return made, nil
}
