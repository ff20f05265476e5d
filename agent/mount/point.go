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

// PathBytes is how long a path can be: PATH_MAX, less its NUL.
const PathBytes = 4095

// IsPoint tells whether a path is clean, absolute and below /. One that is
// no UTF-8 could be written neither into a message nor into JSON.
func IsPoint(path string) bool {
	return utf8.ValidString(path) && filepath.IsAbs(path) && path == filepath.Clean(path) && path != "/" && len(path) <= PathBytes && !strings.ContainsRune(path, 0)
}

// MakePoint makes the directory where it is not there. A path that leads
// through a symbolic link is refused: mountinfo would name the mount by another
// path, by which At would not find it. A refusal leaves no directory at the path.
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
		return refuse("%s is no directory", path)
	}
	switch real, err := filepath.EvalSymlinks(path); {
	case err != nil:
		return refuse("%w", err)
	case real != path:
		return refuse("%s leads through a symbolic link to %s: name that", path, real)
	}
	return made, nil
}
