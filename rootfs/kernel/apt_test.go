package kernel

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

// fakePackage is a package of a fake apt: its file, its SHA-256 according to apt's lists, and its
// dependencies.
type fakePackage struct{ name, deb, sum, depends string }

// fakeApt puts an apt-get and an apt-cache first in PATH, which offer the packages, with targets as
// the host's sources. It returns a directory in which apt-get update writes its options and its
// source list. If the directory contains a file refusal, apt-get update fails with that file's
// text; if it contains a file hang, apt-get does not end.
func fakeApt(t *testing.T, targets string, packages ...fakePackage) string {
	t.Helper()
	bin := t.TempDir()
	for _, pkg := range packages {
		if pkg.deb != "" {
			data, err := os.ReadFile(pkg.deb)
			if err != nil {
				t.Fatal(err)
			}
			kerneltest.WriteFile(t, filepath.Join(bin, "pool", pkg.name+"=6.1.9-1"), data)
		}
		control := fmt.Sprintf("Package: %s\nVersion: 6.1.9-1\nDepends: %s\nSHA256: %s\n", pkg.name, pkg.depends, pkg.sum)
		kerneltest.WriteFile(t, filepath.Join(bin, "lists", pkg.name), []byte(control))
	}
	get := `#!/bin/sh
cd '` + bin + `' && given=$OLDPWD || exit 3
lists=none
for word; do case $word in Dir::State::Lists=*) lists=own ;; Dir::Etc::sourcelist=*) cp "${word#*=}" suite.sources ;; esac; done
for word; do case $word in
indextargets) cat targets-$lists; exit ;;
update) printf '%s\n' "$@" >options; [ ! -f hang ] || { cat hang; exec tail -f /dev/null; }; [ ! -f refusal ] || { cat refusal >&2; exit 100; }; exit ;;
download) for name; do :; done; cp "pool/$name" "$given/package.deb"; exit ;;
esac; done
exit 3
`
	cache := `#!/bin/sh
for name; do :; done
cat '` + bin + `'/lists/"$name"
`
	for name, content := range map[string]string{"apt-get": get, "apt-cache": cache, "targets-own": targets, "targets-none": targets} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
	return bin
}

// unsplit returns the packages of a kernel like bookworm's. sum is the SHA-256 of the package file
// according to apt's lists.
func unsplit(deb, sum string) []fakePackage {
	const name = "linux-image-6.1.0-9-cloud-amd64"
	return []fakePackage{
		{name: metaPackage, depends: name + " (= 6.1.9-1)"},
		{name: name, deb: deb, sum: sum, depends: "kmod, linux-base (>= 4.3~), initramfs-tools (>= 0.120) | linux-initramfs-tool"},
	}
}

// split returns the packages of a kernel like that of trixie's backports, and the package files
// that contain files of the kernel.
func split(t *testing.T) (packages []fakePackage, debs []string) {
	t.Helper()
	const release = "7.3.4+deb13-cloud-amd64"
	modules := "usr/lib/modules/" + release
	for _, part := range []struct {
		kind, depends string
		files         map[string][]byte
	}{
		{"image", "dracut | initramfs-tools, linux-base-" + release + " (= 6.1.9-1), linux-binary-" + release + " (= 6.1.9-1), linux-modules-" + release, map[string][]byte{"usr/share/doc/x": nil}},
		{"base", "", map[string][]byte{modules + "/modules.builtin": []byte("kernel/b.ko\n")}},
		{"binary", "linux-base-" + release, map[string][]byte{modules + "/vmlinuz": []byte("a kernel image")}},
		{"modules", "kmod, linux-base-" + release + ", linux-headers-7.3.4, linux-image-" + release, map[string][]byte{modules + "/kernel/a.ko": kerneltest.Module("depends=b")}},
	} {
		deb := debOf(t, part.files)
		packages = append(packages, fakePackage{name: "linux-" + part.kind + "-" + release, deb: deb, sum: sumOf(t, deb), depends: part.depends})
		debs = append(debs, deb)
	}
	return append(packages, fakePackage{name: metaPackage, depends: "linux-base-cloud-amd64, linux-image-" + release + " (= 6.1.9-1)"}), debs
}

func sumOf(t *testing.T, file string) string {
	t.Helper()
	sum, err := fileSum(file)
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

func TestSecondRunNeedsNoApt(t *testing.T) {
	deb := buildDeb(t)
	fakeApt(t, "", unsplit(deb, sumOf(t, deb))...)
	cache := filepath.Join(t.TempDir(), "cache")
	if _, err := Open(t.Context(), Source{Cache: cache}); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", "")
	k, err := Open(t.Context(), Source{Cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	if k.Version != kerneltest.Version {
		t.Errorf("version:\n got %s\nwant %s", k.Version, kerneltest.Version)
	}
	left, err := filepath.Glob(filepath.Join(cache, "apt-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left of apt's state: %v, %v", left, err)
	}
}

func TestCachedPackageMustHaveItsBytes(t *testing.T) {
	deb := buildDeb(t)
	sum := sumOf(t, deb)
	cache := t.TempDir()
	data, err := os.ReadFile(deb)
	if err != nil {
		t.Fatal(err)
	}
	note := fmt.Sprintf(`{"package":"linux-image-x","version":"1","sha256":%q}`, sum)
	for _, test := range []struct {
		name, note string
		data       []byte
		want       bool
	}{
		{"whole", note, data, true},
		{"a package of several is not there", note + `{"sha256":"` + strings.Repeat("0", 64) + `"}`, data, false},
		{"more packages than a kernel has", strings.Repeat(note, maxPackages+1), data, false},
		{"note is empty", "", data, false},
		{"cut short", note, data[:len(data)-1], false},
		{"note is no JSON", "{", data, false},
		{"note leads elsewhere", `{"sha256":"../../etc/passwd"}`, data, false},
	} {
		kerneltest.WriteFile(t, filepath.Join(cache, "kernel.json"), []byte(test.note))
		kerneltest.WriteFile(t, filepath.Join(cache, sum+".deb"), test.data)
		if _, got := cachedPackages(cache, ""); got != test.want {
			t.Errorf("%s:\n got %v\nwant %v", test.name, got, test.want)
		}
	}
}

func TestDownloadRefusesOtherBytes(t *testing.T) {
	fakeApt(t, "", unsplit(buildDeb(t), strings.Repeat("0", 64))...)
	cache := t.TempDir()
	if _, err := Open(t.Context(), Source{Cache: cache}); err == nil || !strings.Contains(err.Error(), "has SHA-256") {
		t.Errorf("package with another SHA-256:\n got error %v\nwant one that names it", err)
	}
	if left := filesBelow(t, cache); left != "" {
		t.Errorf("left in the cache: %s", left)
	}
}

// apt-get waits in poll(2) forever if it cannot write.
func TestFullDiskEndsADownloadThatHangs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a small disk takes a mount: run as root: go test -run FullDisk ./rootfs/kernel")
	}
	cache := t.TempDir()
	if err := unix.Mount("none", cache, "tmpfs", 0, "size=2m"); err != nil {
		t.Skip(err, ": run where tmpfs can be mounted: go test -run FullDisk ./rootfs/kernel")
	}
	defer unix.Unmount(cache, unix.MNT_DETACH)
	if err := os.WriteFile(filepath.Join(cache, "else"), make([]byte, 3<<19), 0o644); err != nil {
		t.Fatal(err)
	}
	bin := fakeApt(t, "", unsplit(buildDeb(t), strings.Repeat("0", 64))...)
	kerneltest.WriteFile(t, filepath.Join(bin, "hang"), nil)
	var log bytes.Buffer
	_, err := Open(t.Context(), Source{Cache: cache, Progress: output.NewProgress(&log)})
	if err == nil || !strings.Contains(err.Error(), "the disk of "+cache) || !strings.Contains(err.Error(), "is full") || !strings.Contains(err.Error(), "--cache") {
		t.Errorf("\nwant an error that says that the disk is full, and the way out\ngot  %v", err)
	}
	if lines := strings.Count(log.String(), "\n"); lines > 3 {
		t.Errorf("the log\nwant two lines or three\ngot  %d\n%s", lines, log.String())
	}
	if left, err := filepath.Glob(filepath.Join(cache, "apt-*")); err != nil || len(left) > 0 {
		t.Errorf("left of apt's state: %v, %v", left, err)
	}
}

func TestCacheIsTheUsersAndNotTheWorkingDirectorys(t *testing.T) {
	deb := buildDeb(t)
	fakeApt(t, "", unsplit(deb, sumOf(t, deb))...)
	caches := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", caches)
	here := t.TempDir()
	t.Chdir(here)
	if _, err := Open(t.Context(), Source{}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(noteFile(filepath.Join(caches, "directvol"), "")); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(here); err != nil || len(left) > 0 {
		t.Errorf("left in the working directory: %v, %v", left, err)
	}
}

func TestWithoutAptTheErrorSaysWhatToDo(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := Open(t.Context(), Source{Cache: t.TempDir()})
	if err == nil || !strings.Contains(err.Error(), "--kernel-deb") || strings.Contains(err.Error(), "\n") {
		t.Errorf("no apt-get:\n got error %v\nwant one line that names --kernel-deb", err)
	}
}

func TestKernelDependency(t *testing.T) {
	for depends, want := range map[string]string{
		"linux-image-6.1.0-56-cloud-amd64 (= 6.1.192-2)":          "linux-image-6.1.0-56-cloud-amd64",
		"kmod, linux-image-6.12.1+deb13-cloud-amd64 (= 6.12.1)":   "linux-image-6.12.1+deb13-cloud-amd64",
		"linux-image-cloud-amd64":                                 "",
		"linux-image-6.1/../../x, --option linux-image-6.1-amd64": "",
		"": "",
	} {
		got, err := kernelDependency(depends)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q:\n got %q, %v\nwant %q", depends, got, err, want)
		}
	}
}

func TestSplitKernelIsItsPackagesAndNoOthers(t *testing.T) {
	packages, debs := split(t)
	fakeApt(t, "", packages...)
	cache := t.TempDir()
	for _, path := range []string{os.Getenv("PATH"), ""} { // the second time only the cache is used
		t.Setenv("PATH", path)
		k, err := Open(t.Context(), Source{Cache: cache})
		if err != nil {
			t.Fatal(err)
		}
		if want := "7.3.4+deb13-cloud-amd64"; k.Version != want {
			t.Errorf("version:\n got %s\nwant %s", k.Version, want)
		}
		if order, err := k.Order("a"); err != nil || len(order) != 1 {
			t.Errorf("order of a, which needs a built-in module:\n got %v, %v\nwant one module", order, err)
		}
	}
	kept, err := filepath.Glob(filepath.Join(cache, "*.deb"))
	if err != nil || len(kept) != len(debs) {
		t.Errorf("packages in the cache:\n got %d, %v\nwant %d", len(kept), err, len(debs))
	}
}

func TestDownloadGoesOnWhereItEnded(t *testing.T) {
	packages, _ := split(t)
	last := &packages[3] // the package with the modules
	sum := last.sum
	last.sum = strings.Repeat("0", 64)
	fakeApt(t, "", packages...)
	cache := t.TempDir()
	if _, err := Open(t.Context(), Source{Cache: cache}); err == nil || !strings.Contains(err.Error(), last.name) {
		t.Fatalf("a package with another SHA-256:\n got error %v\nwant one that names %s", err, last.name)
	}
	if _, err := os.Stat(noteFile(cache, "")); err == nil {
		t.Error("a note names packages that are not all there")
	}
	last.sum = sum
	for i := range packages[:3] {
		packages[i].deb = "" // no longer offered
	}
	fakeApt(t, "", packages...)
	if _, err := Open(t.Context(), Source{Cache: cache}); err != nil {
		t.Error(err)
	}
}

func TestClosureIsBounded(t *testing.T) {
	var packages []fakePackage
	for i := range maxPackages + 1 {
		part := func(i int) string { return "linux-image" + strings.Repeat("x", i) + "-6.1" }
		packages = append(packages, fakePackage{name: part(i), sum: strings.Repeat("0", 64), depends: part(i + 1)})
	}
	packages = append(packages, fakePackage{name: metaPackage, depends: "linux-image-6.1"})
	fakeApt(t, "", packages...)
	if _, err := Open(t.Context(), Source{Cache: t.TempDir()}); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("packages without end:\n got error %v\nwant one that says more than", err)
	}
}

func TestKernelParts(t *testing.T) {
	for depends, want := range map[string]string{
		"kmod, linux-binary-7.3 (= 1), linux-modules-7.3": "linux-binary-7.3 linux-modules-7.3",
		"linux-image-7.3 | linux-image-unsigned-7.3":      "linux-image-7.3",
		"linux-base (>= 4.17~), linux-base-7.4":           "",
		"linux-../x-7.3, --linux-a-7.3, linux--7.3, -7.3": "",
		" , |,": "",
	} {
		if got := strings.Join(kernelParts(depends, "7.3"), " "); got != want {
			t.Errorf("%q:\n got %q\nwant %q", depends, got, want)
		}
	}
}
