package kernel

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

// tarOf makes a tar stream. The content of each regular file is the file's own name, and its size
// is that length.
func tarOf(t *testing.T, headers ...tar.Header) *bytes.Buffer {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, h := range headers {
		content := ""
		if h.Typeflag == tar.TypeReg {
			content, h.Size = h.Name, int64(len(h.Name))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &out
}

func file(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644} }

func TestUnpackTakesOnlyKernelFiles(t *testing.T) {
	outside := t.TempDir()
	dir := t.TempDir()
	err := unpackTar(tarOf(t,
		tar.Header{Name: "./", Typeflag: tar.TypeDir},
		tar.Header{Name: "./lib", Typeflag: tar.TypeSymlink, Linkname: outside},
		tar.Header{Name: "./boot/vmlinuz-2", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"},
		tar.Header{Name: "./boot/vmlinuz-3", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"},
		file("./boot/vmlinuz-1"),
		file("./boot/System.map-1"),
		file("./lib/modules/1/kernel/fs/a.ko"),
		file("usr/lib/modules/1/kernel/b.ko.xz"),
		file("usr/lib/modules/1/kernel/c.ko.zst"),
		file("usr/lib/modules/1/kernel/d.ko.xz.zst"),
		file("usr/lib/modules/1/vmlinuz"),
		file("usr/lib/modules/1/config"),
		file("./lib/modules/1/modules.builtin"),
		file("./lib/modules/1/modules.builtin.modinfo"),
		file("./lib/modules/1/modules.order"),
		file("./etc/passwd"),
	), dir)
	if err != nil {
		t.Fatal(err)
	}
	want := "boot/vmlinuz-1 lib/modules/1/kernel/fs/a.ko lib/modules/1/modules.builtin lib/modules/1/modules.builtin.modinfo usr/lib/modules/1/kernel/b.ko.xz usr/lib/modules/1/kernel/c.ko.zst usr/lib/modules/1/vmlinuz"
	if got := filesBelow(t, dir); got != want {
		t.Errorf("unpacked:\n got %s\nwant %s", got, want)
	}
	if got := filesBelow(t, outside); got != "" {
		t.Errorf("a link was followed to %s", got)
	}
}

func TestUnpackRefusesPathsThatLeadOut(t *testing.T) {
	for _, name := range []string{"../boot/vmlinuz-1", "./../x", "lib/modules/../../../x", "/boot/vmlinuz-1", ".//etc/passwd", ".."} {
		parent := t.TempDir()
		dir := filepath.Join(parent, "in")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		err := unpackTar(tarOf(t, file(name)), dir)
		if err == nil || !strings.Contains(err.Error(), "leads out") {
			t.Errorf("%q:\n got error %v\nwant one that says it leads out", name, err)
		}
		if got := filesBelow(t, parent); got != "" {
			t.Errorf("%q was written as %s", name, got)
		}
	}
}

func TestUnpackRefusesOversizeAndRepeatedFiles(t *testing.T) {
	var large bytes.Buffer
	header := file("boot/vmlinuz-1")
	header.Size = maxModule + 1
	if err := tar.NewWriter(&large).WriteHeader(&header); err != nil {
		t.Fatal(err)
	}
	for name, stream := range map[string]*bytes.Buffer{
		"too large": &large,
		"twice":     tarOf(t, file("boot/vmlinuz-1"), file("./boot/vmlinuz-1")),
		"cut short": bytes.NewBuffer(tarOf(t, file("boot/vmlinuz-1")).Bytes()[:520]),
	} {
		if err := unpackTar(stream, t.TempDir()); err == nil {
			t.Errorf("%s:\n got no error\nwant one", name)
		}
	}
}

func TestDebIsUnpackedOnceForTheSameBytes(t *testing.T) {
	deb := buildDeb(t)
	cache := t.TempDir()
	for range 2 {
		k, err := Open(t.Context(), Source{Debs: []string{deb}, Cache: cache})
		if err != nil {
			t.Fatal(err)
		}
		if k.Version != kerneltest.Version {
			t.Errorf("version:\n got %s\nwant %s", k.Version, kerneltest.Version)
		}
		if _, err := k.Order("a"); err != nil {
			t.Error(err)
		}
	}
	entries, err := os.ReadDir(cache)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 {
		t.Errorf("entries in the cache:\n got %v\nwant one folder", entries)
	}
}

func TestFailedUnpackLeavesNothing(t *testing.T) {
	whole := buildDeb(t)
	noDeb := filepath.Join(t.TempDir(), "no.deb")
	kerneltest.WriteFile(t, noDeb, []byte("no package"))
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, test := range []struct {
		name, deb string
		ctx       context.Context
		want      string
	}{
		{"no package", noDeb, t.Context(), "dpkg-deb: error"},
		{"cancelled", whole, cancelled, "context canceled"},
	} {
		cache := t.TempDir()
		_, err := Open(test.ctx, Source{Debs: []string{test.deb}, Cache: cache})
		if err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s:\n got error %v\nwant one line with %q", test.name, err, test.want)
		}
		if left, err := os.ReadDir(cache); err != nil || len(left) > 0 {
			t.Errorf("%s: left in the cache: %v, %v", test.name, left, err)
		}
	}
}

func TestSplitPackagesMakeOneKernelInAnyOrder(t *testing.T) {
	_, debs := split(t)
	cache := t.TempDir()
	for range 2 {
		k, err := Open(t.Context(), Source{Debs: debs, Cache: cache})
		if err != nil {
			t.Fatal(err)
		}
		if want := "7.3.4+deb13-cloud-amd64"; k.Version != want {
			t.Errorf("version:\n got %s\nwant %s", k.Version, want)
		}
		slices.Reverse(debs)
	}
	if entries, err := os.ReadDir(cache); err != nil || len(entries) != 1 {
		t.Errorf("entries in the cache:\n got %v, %v\nwant one folder", entries, err)
	}
	_, err := Open(t.Context(), Source{Debs: debs[:1], Cache: cache})
	if err == nil || !strings.Contains(err.Error(), "from all its packages") {
		t.Errorf("one package of several:\n got error %v\nwant one that asks for all", err)
	}
}

// buildDeb makes a kernel package with one module, named a.
func buildDeb(t *testing.T) string {
	t.Helper()
	return debOfTree(t, kerneltest.Tree(t, map[string][]string{"kernel/a.ko": {"depends="}}))
}

// debOf makes a package that contains the given files.
func debOf(t *testing.T, files map[string][]byte) string {
	t.Helper()
	dir := t.TempDir()
	for name, data := range files {
		kerneltest.WriteFile(t, filepath.Join(dir, name), data)
	}
	return debOfTree(t, dir)
}

// debOfTree makes a package that contains the files in dir.
func debOfTree(t *testing.T, dir string) string {
	t.Helper()
	tool, err := exec.LookPath("dpkg-deb")
	if err != nil {
		t.Skip("dpkg-deb, which makes the package for this test, is not installed; try: apt-get install dpkg")
	}
	control := "Package: linux-image-test\nVersion: 1\nArchitecture: amd64\nMaintainer: nobody <nobody@localhost>\nDescription: none\n"
	kerneltest.WriteFile(t, filepath.Join(dir, "DEBIAN", "control"), []byte(control))
	deb := filepath.Join(t.TempDir(), "linux-image-test_1_amd64.deb")
	if out, err := exec.CommandContext(t.Context(), tool, "--build", "--root-owner-group", dir, deb).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb --build: %v: %s", err, out)
	}
	return deb
}

// filesBelow returns the files below dir, separated by spaces.
func filesBelow(t *testing.T, dir string) string {
	t.Helper()
	var files []string
	err := fs.WalkDir(os.DirFS(dir), ".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, path)
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return strings.Join(files, " ")
}

// dpkg-deb has child processes, which continue to write after dpkg-deb has ended.
func TestRefusedPackageEndsItsUnpacker(t *testing.T) {
	bin := t.TempDir()
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.WriteHeader(&tar.Header{Name: "../evil", Mode: 0o644, Size: 1 << 40, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bin, "header"), archive.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\ncat " + filepath.Join(bin, "header") + "\nyes &\nwait\n"
	if err := os.WriteFile(filepath.Join(bin, "dpkg-deb"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	err := unpackDeb(t.Context(), "some.deb", t.TempDir())
	if err == nil || !strings.Contains(err.Error(), "evil") || strings.Contains(err.Error(), "killed") {
		t.Errorf("want the refused name and nothing else\ngot  %v", err)
	}
}
