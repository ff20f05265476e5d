package vm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMissingProductIsNamedWithItsTarget(t *testing.T) {
	top := t.TempDir()
	inside := filepath.Join(top, "tests", "some")
	for _, dir := range []string{inside, filepath.Join(top, "build")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(inside)
	if _, err := FindBuild(); err == nil || !strings.Contains(err.Error(), "Makefile") {
		t.Errorf("outside of a repository\nwant an error that misses Makefile\ngot  %v", err)
	}
	for _, c := range []struct{ make, want string }{
		{"Makefile", "build/directvol is missing: run make build"},
		{"build/directvol", "build/vmlinuz is missing: run make guest"},
		{"build/vmlinuz", "build/guest.cpio is missing: run make guest"},
		{"build/guest.cpio", "build/guest-test.cpio is missing: run make guest"},
	} {
		if err := os.WriteFile(filepath.Join(top, c.make), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := FindBuild(); err == nil || err.Error() != c.want {
			t.Errorf("\nwant %s\ngot  %v", c.want, err)
		}
	}
	if err := os.WriteFile(filepath.Join(top, "build/guest-test.cpio"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	build, err := FindBuild()
	if want, _ := filepath.EvalSymlinks(filepath.Join(top, "build/vmlinuz")); err != nil || build.Kernel != want {
		t.Errorf("want %s\ngot  %s, error %v", want, build.Kernel, err)
	}
	if _, _, err := build.Newer(); err == nil || err.Error() != "build/rescue-vmlinuz is missing: run make rescue" {
		t.Errorf("the newer kernel\nwant an error that names make rescue\ngot  %v", err)
	}
}
