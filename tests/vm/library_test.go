package vm

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestSharedLibrariesAreThoseThatTheLoaderLoads(t *testing.T) {
	program, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		t.Fatal(err)
	}
	found, err := sharedLibraries(program)
	if err != nil {
		t.Fatal(err)
	}
	listed, err := exec.Command(found.loader, "--list", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for line := range strings.Lines(string(listed)) { // "name => path (address)", or "path (address)"
		if name := filepath.Base(strings.Fields(line)[0]); !strings.HasPrefix(name, "linux-vdso") { // the kernel's own
			want = append(want, name)
		}
	}
	for _, f := range found.files {
		got = append(got, f.name)
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(want, got) {
		t.Errorf("%s\nwant %v\ngot  %v", program, want, got)
	}
}

func TestWhatIsNoLinkedProgramIsRefused(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no ELF"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{text, filepath.Join(t.TempDir(), "none")} {
		if _, err := sharedLibraries(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("want an error that names %s\ngot  %v", path, err)
		}
	}
	if _, err := findLibrary("../lib/x86_64-linux-gnu/libc.so.6", libraryDirs); err == nil {
		t.Error("a library's name leads out of its folder")
	}
}

func TestImageHoldsProgramsThatCanRun(t *testing.T) {
	program, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		t.Fatal(err)
	}
	image, err := imageOf(t.Context(), t.TempDir(), []file{{"maker", program}})
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(t.TempDir(), "copy")
	if out, err := exec.Command("debugfs", "-R", "dump -p /maker "+copied, image).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.Command(copied, "-V").CombinedOutput(); err != nil {
		t.Errorf("the copy does not run: %v: %s", err, out)
	}
	fsck, err := Check(t.Context(), "ext4", image)
	if err == nil {
		err = fsck.Err("ext4")
	}
	if err != nil {
		t.Error(err)
	}
}
