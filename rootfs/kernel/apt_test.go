package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

// fakeApt puts an apt-get and an apt-cache first on PATH that offer deb, said to have the SHA-256 sum.
func fakeApt(t *testing.T, deb, sum string) {
	t.Helper()
	bin := t.TempDir()
	get := `#!/bin/sh
for word; do case $word in download) cp '` + deb + `' . ;; linux-image-*) [ "$word" = linux-image-6.1.0-9-cloud-amd64=6.1.9-1 ] || exit 3 ;; esac; done
`
	cache := `#!/bin/sh
for name; do :; done
case $name in
linux-image-cloud-amd64) printf 'Package: %s\nDepends: linux-image-6.1.0-9-cloud-amd64 (= 6.1.9-1)\n' "$name" ;;
*) printf 'Package: %s\nVersion: 6.1.9-1\nSHA256: ` + sum + `\n' "$name" ;;
esac
`
	for name, script := range map[string]string{"apt-get": get, "apt-cache": cache} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
}

func TestSecondRunNeedsNoApt(t *testing.T) {
	deb := buildDeb(t)
	sum, err := fileSum(deb)
	if err != nil {
		t.Fatal(err)
	}
	fakeApt(t, deb, sum)
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
	sum, err := fileSum(deb)
	if err != nil {
		t.Fatal(err)
	}
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
		{"cut short", note, data[:len(data)-1], false},
		{"note is no JSON", "{", data, false},
		{"note leads elsewhere", `{"sha256":"../../etc/passwd"}`, data, false},
	} {
		kerneltest.WriteFile(t, filepath.Join(cache, "kernel.json"), []byte(test.note))
		kerneltest.WriteFile(t, filepath.Join(cache, sum+".deb"), test.data)
		if _, got := cachedPackage(cache); got != test.want {
			t.Errorf("%s:\n got %v\nwant %v", test.name, got, test.want)
		}
	}
}

func TestDownloadRefusesOtherBytes(t *testing.T) {
	fakeApt(t, buildDeb(t), strings.Repeat("0", 64))
	cache := t.TempDir()
	if _, err := Open(t.Context(), Source{Cache: cache}); err == nil || !strings.Contains(err.Error(), "has SHA-256") {
		t.Errorf("package with another SHA-256:\n got error %v\nwant one that names it", err)
	}
	if left := filesBelow(t, cache); left != "" {
		t.Errorf("left in the cache: %s", left)
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
