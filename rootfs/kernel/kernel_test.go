package kernel

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

func TestOpenSaysWhatAFolderLacks(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(dir string)
		want   string
	}{
		{"no image", func(dir string) { os.RemoveAll(filepath.Join(dir, "boot")) }, "holds 0 kernels (boot/vmlinuz-*"},
		{"two images", func(dir string) { kerneltest.WriteFile(t, dir+"/boot/vmlinuz-2", nil) }, "holds 2 kernels"},
		{"no modules", func(dir string) { os.RemoveAll(filepath.Join(dir, "lib")) }, "has no lib/modules/" + kerneltest.Version},
		{"no version", func(dir string) {
			if err := os.Rename(dir+"/boot/vmlinuz-"+kerneltest.Version, dir+"/boot/vmlinuz-a b"); err != nil {
				t.Fatal(err)
			}
		}, `"a b" is not a kernel version`},
		{"a module twice", func(dir string) {
			kerneltest.WriteFile(t, dir+"/lib/modules/"+kerneltest.Version+"/kernel/b/a.ko.xz", nil)
		}, "module a exists twice"},
	} {
		dir := kerneltest.Tree(t, map[string][]string{"kernel/a.ko": nil})
		test.change(dir)
		_, err := Open(t.Context(), Source{Dir: dir})
		if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s:\n got error %v\nwant one with %q and the folder", test.name, err, test.want)
		}
	}
}

func TestOpenFindsModulesBelowUsr(t *testing.T) {
	dir := kerneltest.Tree(t, map[string][]string{"kernel/a.ko": nil})
	if err := os.Mkdir(filepath.Join(dir, "usr"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "lib"), filepath.Join(dir, "usr", "lib")); err != nil {
		t.Fatal(err)
	}
	k, err := Open(t.Context(), Source{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if order, err := k.Order("a"); err != nil || len(order) != 1 {
		t.Errorf("order of a:\n got %v, %v\nwant one module", order, err)
	}
}

func TestOpenFindsTheImageBesideTheModules(t *testing.T) {
	dir := kerneltest.Tree(t, map[string][]string{"kernel/a.ko": nil})
	beside := filepath.Join(dir, "lib", "modules", kerneltest.Version, "vmlinuz")
	kerneltest.WriteFile(t, beside, []byte("a kernel image"))
	for _, want := range []string{filepath.Join(dir, "boot", "vmlinuz-"+kerneltest.Version), beside} { // an installed kernel has both files
		k, err := Open(t.Context(), Source{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		if k.Image != want || k.Version != kerneltest.Version {
			t.Errorf("image and version:\n got %s, %s\nwant %s, %s", k.Image, k.Version, want, kerneltest.Version)
		}
		if err := os.RemoveAll(filepath.Join(dir, "boot")); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOpenRefusesTwoSources(t *testing.T) {
	for name, src := range map[string]Source{
		"a package and a folder": {Debs: []string{"a.deb"}, Dir: "b"},
		"a suite and a package":  {Suite: "trixie", Debs: []string{"a.deb"}},
		"a suite and a folder":   {Suite: "trixie", Dir: "b"},
	} {
		if _, err := Open(t.Context(), src); err == nil || !strings.Contains(err.Error(), "both named") {
			t.Errorf("%s:\n got error %v\nwant one that says both are named", name, err)
		}
	}
}
