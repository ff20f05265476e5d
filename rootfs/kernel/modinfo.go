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

// modinfo contains the entries of a module's .modinfo section that matter for loading.
type modinfo struct {
	depends []string // names of modules that must be loaded before
	pre     []string // names or aliases of modules that should be loaded before
	aliases []string
}

// parseModinfo parses a .modinfo section: NUL-terminated "key=value" strings with any padding
// between them.
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

// softdepPre returns the names after "pre:" (modprobe.d(5)). Like modprobe, it ignores names before
// the first such word.
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

// readModinfo reads the .modinfo section of the module in file. If the module is not compressed, it
// reads only that section.
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
		return modinfo{}, fmt.Errorf("not an ELF object: %w", err)
	}
	section := object.Section(".modinfo")
	if section == nil {
		return modinfo{}, errors.New("not a kernel module: it has no .modinfo section")
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

// uncompressed returns the name of a module's file without the suffix of its compression.
func uncompressed(file string) string {
	return strings.TrimSuffix(strings.TrimSuffix(file, ".xz"), ".zst")
}

// readModule reads and decompresses the module in file.
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

// decompress decompresses a module with the method given by its file name's extension.
func decompress(r io.Reader, ext string) ([]byte, error) {
	switch ext {
	case ".xz":
		unpacked, err := xz.NewReader(r)
		if err != nil {
			return nil, fmt.Errorf("decompress: %w", err)
		}
		r = unpacked
	case ".zst":
		// Without a limit, the frame's header alone would decide how much memory is allocated.
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
