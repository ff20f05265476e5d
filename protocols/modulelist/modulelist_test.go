package modulelist

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

func TestLinesAreTakenInTheirOrder(t *testing.T) {
	got, err := Read(strings.NewReader("/b.ko\n\n/a.ko\n/c.ko"))
	if want := []string{"/b.ko", "/a.ko", "/c.ko"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("want %q\ngot  %q, error %v", want, got, err)
	}
}

func TestInvalidListIsRefused(t *testing.T) {
	for name, text := range map[string]string{
		"a relative path":  "/a.ko\nb.ko\n",
		"a line too long":  "/" + strings.Repeat("x", maxPath) + "\n",
		"without an end":   strings.Repeat("x", 1<<20),
		"too many modules": strings.Repeat("/a.ko\n", maxModules+1),
		"a zero byte":      "/a\x00.ko\n",
	} {
		if got, err := Read(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), "module list") {
			t.Errorf("%s\nwant an error that names the list\ngot  %d paths, %v", name, len(got), err)
		}
	}
	if _, err := Text([]string{"/a.ko\n/b.ko"}); err == nil {
		t.Error("a path of two lines is written")
	}
}

// An accepted list must be unchanged after writing and reading it again.
func FuzzRead(f *testing.F) {
	f.Add([]byte("/lib/modules/6.1.0/kernel/fs/xfs/xfs.ko\n/a.ko\n"))
	f.Add([]byte("\n\n/a.ko\r\n"))
	f.Add([]byte("a.ko"))
	f.Fuzz(func(t *testing.T, text []byte) {
		paths, err := Read(bytes.NewReader(text))
		if err != nil {
			return
		}
		written, err := Text(paths)
		if err != nil {
			t.Fatalf("%q is read and not written: %v", paths, err)
		}
		again, err := Read(bytes.NewReader(written))
		if err != nil || !slices.Equal(again, paths) {
			t.Errorf("want %q\ngot  %q, %v", paths, again, err)
		}
	})
}
