package kernel

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

const (
	maxModule  = 64 << 20 // bytes of one module; Debian's largest is below 6 MiB
	maxModinfo = 1 << 20  // bytes of a .modinfo section
)

// modinfo is what a module says about itself, as far as loading it depends on that.
type modinfo struct {
	depends []string // modules that must be loaded before, by name
	pre     []string // modules that should be, by name or by alias
	aliases []string
}

// parseModinfo reads a .modinfo section: NUL-terminated "key=value" strings, with any padding between them.
func parseModinfo(section []byte) (modinfo, error) {
	var info modinfo
	if len(section) > maxModinfo {
		return info, fmt.Errorf(".modinfo has %d bytes, more than %d", len(section), maxModinfo)
	}
	for entry := range bytes.SplitSeq(section, []byte{0}) {
		if len(entry) == 0 {
			continue
		}
		key, value, ok := strings.Cut(string(entry), "=")
		if !ok {
			return info, fmt.Errorf(".modinfo entry %.40q has no =", entry)
		}
		switch key {
		case "depends":
			info.depends = append(info.depends, strings.FieldsFunc(value, func(r rune) bool { return r == ',' })...)
		case "softdep":
			info.pre = append(info.pre, softdepPre(value)...)
		case "alias":
			info.aliases = append(info.aliases, value)
		}
	}
	return info, nil
}

// softdepPre picks the names after "pre:" (modprobe.d(5)). Names before any such word count for nothing, as in modprobe.
func softdepPre(value string) []string {
	var names []string
	pre := false
	for _, word := range strings.Fields(value) {
		switch {
		case strings.HasSuffix(word, ":"):
			pre = word == "pre:"
		case pre:
			names = append(names, word)
		}
	}
	return names
}

// readModinfo reads the .modinfo section of the module in file. Of an uncompressed module it reads no more than that.
func readModinfo(file string) (modinfo, error) {
	if file != uncompressed(file) {
		data, err := readModule(file)
		if err != nil {
			return modinfo{}, err
		}
		return elfModinfo(bytes.NewReader(data))
	}
	f, err := os.Open(file)
	if err != nil {
		return modinfo{}, err
	}
	defer f.Close()
	return elfModinfo(f)
}

func elfModinfo(r io.ReaderAt) (modinfo, error) {
	object, err := elf.NewFile(r)
	if err != nil {
		return modinfo{}, fmt.Errorf("no ELF object: %w", err)
	}
	section := object.Section(".modinfo")
	if section == nil {
		return modinfo{}, errors.New("no kernel module: it has no .modinfo section")
	}
	if section.Size > maxModinfo {
		return modinfo{}, fmt.Errorf(".modinfo has %d bytes, more than %d", section.Size, maxModinfo)
	}
	data, err := section.Data()
	if err != nil {
		return modinfo{}, fmt.Errorf("read .modinfo: %w", err)
	}
	return parseModinfo(data)
}

// uncompressed gives the name that a module's file has once it is decompressed.
func uncompressed(file string) string {
	return strings.TrimSuffix(strings.TrimSuffix(file, ".xz"), ".zst")
}

// readModule reads the module in file, decompressed.
func readModule(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := decompress(f, filepath.Ext(file))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	return data, nil
}

// decompress reads all of a module that is compressed as the end of its file's name says.
func decompress(r io.Reader, ext string) ([]byte, error) {
	switch ext {
	case ".xz":
		unpacked, err := xz.NewReader(r)
		if err != nil {
			return nil, fmt.Errorf("decompress: %w", err)
		}
		r = unpacked
	case ".zst":
		// Without a limit a frame's header alone decides how much is allocated.
		unpacked, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxModule))
		if err != nil {
			return nil, fmt.Errorf("decompress: %w", err)
		}
		defer unpacked.Close()
		r = unpacked
	}
	data, err := io.ReadAll(io.LimitReader(r, maxModule+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxModule {
		return nil, fmt.Errorf("the module has more than %d bytes", maxModule)
	}
	return data, nil
}
