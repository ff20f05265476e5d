package kernel

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/ulikunitz/xz"

	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

func compress(t *testing.T, data []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := xz.NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestParseModinfoTakesWhatLoadingNeeds(t *testing.T) {
	got, err := parseModinfo([]byte("\x00\x00license=GPL\x00depends=a,b-c\x00\x00softdep=pre: d e post: f\x00softdep=pre: g\x00alias=fs-x\x00parm=x=y"))
	if err != nil {
		t.Fatal(err)
	}
	want := modinfo{depends: []string{"a", "b-c"}, pre: []string{"d", "e", "g"}, aliases: []string{"fs-x"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("modinfo:\n got %+v\nwant %+v", got, want)
	}
}

func TestModinfoRefusesWhatIsNoModule(t *testing.T) {
	for name, data := range map[string][]byte{
		"empty":             nil,
		"text":              []byte("#!/bin/sh\n"),
		"cut short":         kerneltest.Module("depends=a")[:80],
		"no = in an entry":  kerneltest.Module("depends"),
		"oversize .modinfo": kerneltest.Object(make([]byte, maxModinfo+1)),
	} {
		if got, err := elfModinfo(bytes.NewReader(data)); err == nil {
			t.Errorf("%s:\n got %+v\nwant an error", name, got)
		}
	}
}

func TestReadModuleIsBounded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "large.ko")
	kerneltest.WriteFile(t, file, nil)
	if err := os.Truncate(file, maxModule+1); err != nil {
		t.Fatal(err)
	}
	if _, err := readModule(file); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("module of %d bytes:\n got error %v\nwant one that says more than", maxModule+1, err)
	}
}

func TestReadModuleRefusesDamagedXZ(t *testing.T) {
	whole := compress(t, kerneltest.Module("depends="))
	flipped := bytes.Clone(whole)
	flipped[len(flipped)/2] ^= 0xff
	for name, data := range map[string][]byte{"cut short": whole[:len(whole)-8], "flipped": flipped, "plain": []byte("plain")} {
		file := filepath.Join(t.TempDir(), "m.ko.xz")
		kerneltest.WriteFile(t, file, data)
		if _, err := readModule(file); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%s:\n got error %v\nwant one that names %s", name, err, file)
		}
	}
}

func FuzzModinfo(f *testing.F) {
	f.Add([]byte("depends=a,b\x00softdep=pre: c post: d\x00alias=e\x00"))
	f.Add([]byte("\x00\x00depends=\x00softdep=pre:\x00"))
	f.Add([]byte("depends"))
	f.Add(kerneltest.Module("depends=a", "softdep=pre: b"))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, _ = elfModinfo(bytes.NewReader(data)) // an object from anywhere
		info, err := parseModinfo(data)
		inObject, objectErr := elfModinfo(bytes.NewReader(kerneltest.Object(data)))
		if (err == nil) != (objectErr == nil) || !reflect.DeepEqual(info, inObject) {
			t.Errorf("section alone and in an object:\n got %+v, %v\nwant %+v, %v", inObject, objectErr, info, err)
		}
		for _, name := range info.depends {
			if name == "" || strings.ContainsAny(name, ",\x00") {
				t.Errorf("name %q taken from %q", name, data)
			}
		}
		for _, name := range info.pre { // a comma separates nothing here
			if name == "" || strings.ContainsAny(name, " \x00") {
				t.Errorf("name %q taken from %q", name, data)
			}
		}
	})
}
