package mount

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMountPointIsMadeOnce(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "a", "b")
	for _, want := range []bool{true, false} {
		made, err := MakePoint(path)
		if err != nil || made != want {
			t.Errorf("want it made: %v\ngot  %v, error %v", want, made, err)
		}
	}
}

func TestMountPointThroughALinkOrFileIsRefused(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Mkdir(filepath.Join(dir, "real"), 0o700), os.Symlink("real", link)); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"file": file, "below a file": file + "/x", "link": link, "behind a link": link + "/x", "proc": "/proc/nothing/x",
	} {
		made, err := MakePoint(path)
		if made || err == nil {
			t.Errorf("%s: made %v\nwant it refused\ngot  %v", name, made, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "real", "x")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a refused mount point is still there: %v", err)
	}
}

func TestMountPointIsAPathThatTheKernelTakes(t *testing.T) {
	long := "/" + strings.Repeat("x", PathBytes-1)
	for path, want := range map[string]bool{
		"/a": true, "/a/ä": true, long: true, long + "x": false, "": false, "/": false, "a": false, "/a/": false, "/a/../b": false, "/a\x00": false, "/\xff": false,
	} {
		if got := IsPoint(path); got != want {
			t.Errorf("%.40q of %d bytes\nwant %v\ngot  %v", path, len(path), want, got)
		}
	}
}
