package rootfs

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"path"
	"slices"
	"strings"

	"github.com/u-root/u-root/pkg/cpio"
)

// archive collects an image's files by their paths without the leading slash, as in cpio.
type archive struct {
	records map[string]cpio.Record
}

// newArchive returns an archive with the files of every image: the mount points for a guest's PID
// 1, and the console, which the kernel opens before devtmpfs is mounted (init/main.c,
// console_on_rootfs).
func newArchive() *archive {
	a := &archive{records: map[string]cpio.Record{}}
	for _, dir := range []string{"dev", "etc", "proc", "run", "sys"} {
		a.records[dir] = cpio.Directory(dir, 0o755)
	}
	a.records["tmp"] = cpio.Directory("tmp", 0o1777)
	a.records["dev/console"] = cpio.CharDev("dev/console", 0o600, 5, 1)
	return a
}

// addFile adds a regular file at an absolute, clean and unused path, and the directories above it.
func (a *archive) addFile(guest string, mode uint64, data []byte) error {
	if !path.IsAbs(guest) || path.Clean(guest) != guest || guest == "/" || strings.ContainsAny(guest, "\x00\n") {
		return fmt.Errorf("guest path %q: want an absolute path without . and .. in it", guest)
	}
	if uint64(len(data)) > math.MaxUint32 {
		return fmt.Errorf("guest path %s: %d bytes are too many for a cpio archive", guest, len(data))
	}
	name := guest[1:]
	if _, taken := a.records[name]; taken {
		return fmt.Errorf("guest path %s is named twice, or is a folder of the image", guest)
	}
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		above, there := a.records[dir]
		if there && above.Mode&cpio.S_IFMT != cpio.S_IFDIR {
			return fmt.Errorf("guest path %s lies below /%s, which is a file", guest, dir)
		}
		if !there {
			a.records[dir] = cpio.Directory(dir, 0o755)
		}
	}
	a.records[name] = cpio.StaticRecord(data, cpio.Info{Name: name, Mode: cpio.S_IFREG | mode})
	return nil
}

// checkInit refuses an image that cannot boot: an image without /init, or with an /init that needs
// a dynamic linker that is not in the image (the kernel's message would only be that there is no
// working init).
func (a *archive) checkInit() error {
	init, ok := a.records["init"]
	if !ok {
		return errors.New("no program is named as /init, which the kernel starts: name one (--program /init=FILE)")
	}
	object, err := elf.NewFile(init)
	if err != nil {
		return fmt.Errorf("program /init is not an ELF executable: %w", err)
	}
	for _, segment := range object.Progs {
		if segment.Type != elf.PT_INTERP {
			continue
		}
		name, err := io.ReadAll(io.LimitReader(segment.Open(), 4096))
		if err != nil {
			return fmt.Errorf("program /init: read its interpreter's name: %w", err)
		}
		linker := string(bytes.TrimRight(name, "\x00"))
		if _, ok := a.records[strings.TrimPrefix(linker, "/")]; !ok {
			return fmt.Errorf("program /init is not static: it needs %s; build it with CGO_ENABLED=0", linker)
		}
	}
	return nil
}

// WriteTo writes the archive. The entries are sorted, so that a directory comes before its
// contents. They are owned by root, have time zero, and inode numbers from one.
func (a *archive) WriteTo(w io.Writer) (int64, error) {
	counted := &countingWriter{w: w}
	out := cpio.Newc.Writer(counted)
	for i, name := range slices.Sorted(maps.Keys(a.records)) {
		record := a.records[name]
		record.Ino, record.NLink = uint64(i+1), 1
		if err := out.WriteRecord(record); err != nil {
			return counted.n, err
		}
	}
	err := cpio.WriteTrailer(out)
	return counted.n, err
}

type countingWriter struct {
	w io.Writer
	n int64
}

func (c *countingWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}
