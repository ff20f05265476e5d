// Package kerneltest makes small kernels for tests: directories with the layout of Debian's kernel
// package, whose modules are ELF objects with nothing but a .modinfo section. These kernels cannot
// boot.
package kerneltest

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Version is the release of the kernels that this package makes.
const Version = "6.1.0-1-cloud-amd64"

// Tree makes a kernel in a new temporary directory and returns the directory. modules contains the
// .modinfo entries of each module, by path below lib/modules/Version, such as kernel/fs/xfs/xfs.ko.
// builtIn contains the lines of modules.builtin.
func Tree(t testing.TB, modules map[string][]string, builtIn ...string) string {
	t.Helper()
	dir := t.TempDir()
	WriteFile(t, filepath.Join(dir, "boot", "vmlinuz-"+Version), []byte("a kernel image"))
	root := filepath.Join(dir, "lib", "modules", Version)
	if err := os.MkdirAll(filepath.Join(root, "kernel"), 0o755); err != nil {
		t.Fatal(err)
	}
	for path, entries := range modules {
		WriteFile(t, filepath.Join(root, path), Module(entries...))
	}
	WriteFile(t, filepath.Join(root, "modules.builtin"), []byte(strings.Join(builtIn, "\n")))
	return dir
}

// Module makes an ELF object whose .modinfo section contains the entries, each "key=value".
func Module(entries ...string) []byte {
	var modinfo []byte
	for _, entry := range entries {
		modinfo = append(append(modinfo, entry...), 0)
	}
	return Object(modinfo)
}

// Object makes an ELF object with the given bytes as its .modinfo section.
func Object(modinfo []byte) []byte {
	const headerSize, sectionSize = 64, 64
	names := "\x00.modinfo\x00.shstrtab\x00"
	end := uint64(headerSize + len(modinfo) + len(names))
	header := elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Shoff: end, Ehsize: headerSize, Shentsize: sectionSize, Shnum: 3, Shstrndx: 2,
	}
	sections := []elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: headerSize, Size: uint64(len(modinfo)), Addralign: 1},
		{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: headerSize + uint64(len(modinfo)), Size: uint64(len(names)), Addralign: 1},
	}
	var object bytes.Buffer
	for _, part := range []any{header, modinfo, []byte(names), sections} {
		if err := binary.Write(&object, binary.LittleEndian, part); err != nil {
			panic(err) // only possible after a wrong type above
		}
	}
	return object.Bytes()
}

// WriteFile writes a file and makes the directories above it.
func WriteFile(t testing.TB, file string, data []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, data, 0o644); err != nil {
		t.Fatal(err)
	}
}
