// Package logwrites reads a record of a disk's writes and flushes, and makes the image that a power
// cut at some point would have left. The record has the format of the kernel's dm-log-writes
// (Documentation/admin-guide/device-mapper/log-writes.rst, drivers/md/dm-log-writes.c), which
// QEMU's blklogwrites also writes: a sector with the superblock, then for each request a sector
// with its entry, followed by the data. All numbers are little endian.
//
// An image has every write up to the last flush before the cut. Of the writes after that flush it
// has none, all or some (After). A write with FUA counts as flushed. Of another write, an image may
// have some pieces without the rest. A piece is 4096 bytes of the disk: today's disks write pieces
// whole, and filesystems rely on that for their superblocks. A discard changes nothing, because no
// disk promises any content after it.
//
// blklogwrites records a request when the request is done, and before its sender gets the answer.
// So the record has everything that was flushed before an answer, and each image made here is one
// that a real cut can leave. A real cut can also leave other images: a write that is done while a
// flush runs counts as flushed here, and a real cut may lose it.
package logwrites

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
)

const (
	magic     = 0x6a736677736872
	version   = 1
	superSize = 28 // magic, version, count of entries, 4 bytes of sector size
	entrySize = 32 // sector, count of sectors, flags, length of a mark's text
)

// Flags of an entry.
const (
	Flush    = 1 << iota // all earlier writes are durable after this entry
	FUA                  // this write is durable
	Discard              // no data
	Mark                 // a note, not a request
	Metadata             // the writer marked the data as metadata of a filesystem

	knownFlags = 1<<iota - 1
)

// Bounds of a valid record: the size of its sectors, and the bytes of one write.
const (
	minSector = 512
	maxSector = 4096
	maxWrite  = 1 << 30
)

// Entry is a request to the disk.
type Entry struct {
	Flags  uint64
	Offset int64 // on the disk, in bytes
	Bytes  int64 // 0 if it wrote nothing
	Data   int64 // offset of the written data in the record
	End    int64 // length of the record up to and including this entry and its data
}

// Writes reports whether the entry writes the byte at an offset of the disk.
func (e Entry) Writes(offset int64) bool { return e.Offset <= offset && offset-e.Offset < e.Bytes }

// Read reads the entries of a record of size bytes. It ignores the count in the record's
// superblock, which is older than the last entries: the record ends at the first incomplete entry.
// An invalid entry is an error. A record that was cut off before its superblock, which is written
// with the first flush, has no entries.
func Read(record io.ReaderAt, size int64) ([]Entry, error) {
	sector, err := readSuper(record, size)
	if errors.Is(err, errNotBegun) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var entries []Entry
	for at := sector; size-at >= sector; {
		var raw [entrySize]byte
		if _, err := record.ReadAt(raw[:], at); err != nil {
			return nil, fmt.Errorf("read the entry at %d: %w", at, err)
		}
		if raw == [entrySize]byte{} { // a later write reached the record, but this entry did not
			break
		}
		e, err := decode(raw, at, sector)
		if err != nil {
			return nil, fmt.Errorf("the entry at %d: %w", at, err)
		}
		if e.End > size {
			break
		}
		entries = append(entries, e)
		at = e.End
	}
	return entries, nil
}

// errNotBegun is the error of a record without a superblock, which is written later.
var errNotBegun = errors.New("no superblock yet")

func readSuper(record io.ReaderAt, size int64) (sector int64, err error) {
	var raw [superSize]byte
	if size < superSize {
		return 0, fmt.Errorf("a record of %d bytes has no superblock", size)
	}
	if _, err := record.ReadAt(raw[:], 0); err != nil {
		return 0, fmt.Errorf("read the superblock: %w", err)
	}
	if raw == [superSize]byte{} {
		return 0, errNotBegun
	}
	if got := binary.LittleEndian.Uint64(raw[0:]); got != magic {
		return 0, fmt.Errorf("no record: its magic number is %#x, not %#x", got, uint64(magic))
	}
	if got := binary.LittleEndian.Uint64(raw[8:]); got != version {
		return 0, fmt.Errorf("a record of version %d, not %d", got, version)
	}
	sector = int64(binary.LittleEndian.Uint32(raw[24:]))
	if sector < minSector || sector > maxSector || sector&(sector-1) != 0 {
		return 0, fmt.Errorf("a record with sectors of %d bytes: want a power of two from %d to %d", sector, minSector, maxSector)
	}
	return sector, nil
}

func decode(raw [entrySize]byte, at, sector int64) (Entry, error) {
	first, count := binary.LittleEndian.Uint64(raw[0:]), binary.LittleEndian.Uint64(raw[8:])
	e := Entry{Flags: binary.LittleEndian.Uint64(raw[16:]), Data: at + sector, End: at + sector}
	switch {
	case e.Flags&^knownFlags != 0:
		return e, fmt.Errorf("unknown flags %#x", e.Flags)
	case e.Flags&(Discard|Mark) != 0: // the text of a mark is in the entry's own sector
		return e, nil
	case count > maxWrite/uint64(sector):
		return e, fmt.Errorf("a write of %d sectors, more than %d bytes", count, maxWrite)
	case first > (math.MaxInt64-maxWrite)/uint64(sector):
		return e, fmt.Errorf("a write to sector %d, beyond every disk", first)
	}
	e.Offset, e.Bytes = int64(first)*sector, int64(count)*sector
	e.End += e.Bytes
	return e, nil
}
