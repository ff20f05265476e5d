// Package logwrites reads a record of a disk's writes and flushes, and makes of it
// the image that a power cut at some point would have left. The record's format is
// that of the kernel's dm-log-writes (Documentation/admin-guide/device-mapper/
// log-writes.rst, drivers/md/dm-log-writes.c), which QEMU's blklogwrites writes too:
// a sector with the superblock, then for each request a sector with its entry and
// behind it the data. All numbers are little endian.
//
// What a cut leaves: every write up to the last flush before the point, and of the
// writes after that flush none, all, or some (After). blklogwrites notes a request
// when it is done, and only then its sender is answered: so what was flushed before
// an answer is in the record, and each such image is one that a real cut can leave.
// Not every one is made: a write that is done while a flush is under way counts as
// flushed. A write with FUA counts as flushed too. Of the others some pieces may
// have reached the disk without the rest: a piece is 4096 bytes of the disk, which
// today's disks write whole, as filesystems expect of their superblocks. A discard
// changes nothing: what it leaves behind is nobody's promise.
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
	Flush    = 1 << iota // what was written before is durable with it
	FUA                  // this write is
	Discard              // no data
	Mark                 // somebody's note, no request
	Metadata             // the writer says that it is a filesystem's own

	knownFlags = 1<<iota - 1
)

// Bounds of what is believed of a record: its sectors, and the bytes of one write.
const (
	minSector = 512
	maxSector = 4096
	maxWrite  = 1 << 30
)

// Entry is a request that the disk was sent.
type Entry struct {
	Flags  uint64
	Offset int64 // on the disk, in bytes
	Bytes  int64 // 0 where it wrote nothing
	Data   int64 // where the record has what was written
	End    int64 // how long the record is with this entry, and its data, at its end
}

// Writes reports whether the entry writes the byte at an offset of the disk.
func (e Entry) Writes(offset int64) bool { return e.Offset <= offset && offset-e.Offset < e.Bytes }

// Read reads the entries of a record of so many bytes. The count in its superblock
// is not looked at, as it is older than the last entries: the record ends where an
// entry is not there in full. An entry that cannot be one is an error. A record that
// was cut off before its superblock, which comes with the first flush, has none.
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
		if raw == [entrySize]byte{} { // a write ahead of it is there and it is not
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

// errNotBegun is of a record whose superblock is still to be written.
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
	case e.Flags&(Discard|Mark) != 0: // a mark's text is in the entry's own sector
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
