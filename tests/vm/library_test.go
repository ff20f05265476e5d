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
		if name := filepath.Base(strings.Fields(line)[0]); !strings.HasPrefix(name, "linux-vdso") { // the kernel's own library
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

func TestFileThatIsNotALinkedProgramIsRefused(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no ELF"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{text, filepath.Join(t.TempDir(), "none")} {
		if _, err := sharedLibraries(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("want an error that names %s\ngot  %v", path, err)
		}
	}
}

// gcc makes a program, and the program's library is removed.
func TestMissingLibraryIsNamed(t *testing.T) {
	dir := t.TempDir()
	library, program := filepath.Join(dir, "libgone.so"), filepath.Join(dir, "program")
	build := func(text string, args ...string) {
		gcc := exec.Command("gcc", append([]string{"-x", "c", "-"}, args...)...)
		gcc.Stdin = strings.NewReader(text)
		if out, err := gcc.CombinedOutput(); err != nil {
			t.Fatalf("gcc %q: %v: %s", args, err, out)
		}
	}
	build("int gone(void) { return 0; }", "-shared", "-o", library)
	build("int gone(void); int main(void) { return gone(); }", "-o", program, "-L"+dir, "-Wl,-rpath,"+dir, "-lgone")
	found, err := sharedLibraries(program)
	if err != nil || !slices.Contains(found.files, file{"libgone.so", library}) {
		t.Errorf("want %s among its libraries\ngot  %v, %v", library, found, err)
	}
	if err := os.Remove(library); err != nil {
		t.Fatal(err)
	}
	if _, err := sharedLibraries(program); err == nil || !strings.Contains(err.Error(), "libgone.so") || !strings.Contains(err.Error(), program) {
		t.Errorf("want an error that names libgone.so and %s\ngot  %v", program, err)
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
