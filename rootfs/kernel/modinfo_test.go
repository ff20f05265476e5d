package kernel

import (
	"bytes"
	"errors"
	"io"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"

	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

// compress compresses data with the method of the file name extension.
func compress(t testing.TB, ext string, data []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	var w io.WriteCloser
	var err error
	switch ext {
	case ".xz":
		w, err = xz.NewWriter(&out)
	case ".zst":
		w, err = zstd.NewWriter(&out)
	}
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

func TestModinfoRefusesFilesThatAreNotModules(t *testing.T) {
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
	for ext, data := range map[string][]byte{"": make([]byte, maxModule+1), ".zst": zstdZeros(maxModule + 1)} {
		file := filepath.Join(t.TempDir(), "large.ko"+ext)
		kerneltest.WriteFile(t, file, data)
		if _, err := readModule(file); err == nil || !strings.Contains(err.Error(), "more than") {
			t.Errorf("module %q of more than %d bytes:\n got error %v\nwant one that says more than", ext, maxModule, err)
		}
	}
}

// zstdZeros makes a frame of a few KB that decompresses to n zeros or slightly more: blocks of one
// repeated byte (RFC 8878, 3.1.1.2).
func zstdZeros(n int) []byte {
	const blockSize, windowOf8MiB, rle = 128 << 10, (23 - 10) << 3, 1
	frame := []byte{0x28, 0xb5, 0x2f, 0xfd, 0, windowOf8MiB}
	for ; n > 0; n -= blockSize {
		header := blockSize<<3 | rle<<1
		if n <= blockSize {
			header |= 1 // the last block
		}
		frame = append(frame, byte(header), byte(header>>8), byte(header>>16), 0)
	}
	return frame
}

func TestReadModuleRefusesDamage(t *testing.T) {
	for _, ext := range []string{".xz", ".zst"} {
		whole := compress(t, ext, kerneltest.Module("depends="))
		flipped := bytes.Clone(whole)
		flipped[len(flipped)/2] ^= 0xff
		for name, data := range map[string][]byte{"cut short": whole[:len(whole)-8], "flipped": flipped, "plain": []byte("plain")} {
			file := filepath.Join(t.TempDir(), "m.ko"+ext)
			kerneltest.WriteFile(t, file, data)
			if _, err := readModule(file); err == nil || !strings.Contains(err.Error(), file) {
				t.Errorf("%s, %s:\n got error %v\nwant one that names %s", ext, name, err, file)
			}
		}
	}
}

// A frame's header says how much output must be kept in memory to decode the rest (RFC 8878,
// 3.1.1.1.2).
func TestReadModuleRefusesAHugeWindow(t *testing.T) {
	file := filepath.Join(t.TempDir(), "m.ko.zst")
	const windowOfOneGiB = (30 - 10) << 3
	kerneltest.WriteFile(t, file, []byte{0x28, 0xb5, 0x2f, 0xfd, 0, windowOfOneGiB, 1, 0, 0})
	if _, err := readModule(file); !errors.Is(err, zstd.ErrWindowSizeExceeded) {
		t.Errorf("window of 1 GiB:\n got error %v\nwant %v", err, zstd.ErrWindowSizeExceeded)
	}
}

// testdata/zstd.ko.zst was made by zstd 1.5.4, at level 19.
func TestReadModuleDecompressesWhatZstdMade(t *testing.T) {
	want := kerneltest.Module("depends=a,b", "softdep=pre: c")
	got, err := readModule(filepath.Join("testdata", "zstd.ko.zst"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("module:\n got %x, %v\nwant %x", got, err, want)
	}
}

func FuzzModinfo(f *testing.F) {
	f.Add([]byte("depends=a,b\x00softdep=pre: c post: d\x00alias=e\x00"))
	f.Add([]byte("\x00\x00depends=\x00softdep=pre:\x00"))
	f.Add([]byte("depends"))
	f.Add(kerneltest.Module("depends=a", "softdep=pre: b"))
	for _, ext := range []string{".xz", ".zst"} {
		f.Add(compress(f, ext, kerneltest.Module("depends=a", "softdep=pre: b")))
	}
	f.Add(zstdZeros(1 << 20))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, ext := range []string{".xz", ".zst"} {
			if plain, err := decompress(bytes.NewReader(data), ext); err == nil && len(plain) > maxModule {
				t.Errorf("%s gives %d bytes, more than %d", ext, len(plain), maxModule)
			}
		}
		_, _ = elfModinfo(bytes.NewReader(data)) // an untrusted object
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
		for _, name := range info.pre { // commas do not separate these names
			if name == "" || strings.ContainsAny(name, " \x00") {
				t.Errorf("name %q taken from %q", name, data)
			}
		}
	})
}
