package filesystem

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
)

// directDisk reads a disk past the page cache of the block device, because xfs and newer versions
// of btrfs do not write through that cache.
type directDisk struct {
	file  *os.File
	page  []byte          // aligned, and large enough for every read
	parts *blockdev.Parts // nil until readMany needs it
}

// directBytes is enough for the headers of an xfs's group with the largest sectors.
const directBytes = 3 * 32 << 10

// openDirect opens a disk. The caller closes it.
func openDirect(disk string) (*directDisk, error) {
	page, err := unix.Mmap(-1, 0, directBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	file, err := openUnpolled(disk, unix.O_DIRECT)
	if err != nil {
		unix.Munmap(page)
		return nil, err
	}
	return &directDisk{file: file, page: page}, nil
}

func (d *directDisk) close() {
	if d.parts != nil {
		d.parts.Close()
	}
	d.file.Close()
	unix.Munmap(d.page)
}

// read returns bytes of the disk, at most directBytes. The result is valid until the next read.
func (d *directDisk) read(bytes int, at uint64) ([]byte, error) {
	if _, err := d.file.ReadAt(d.page[:wholePages(bytes)], int64(at)); err != nil {
		return nil, err
	}
	return d.page[:bytes], nil
}

// readMany returns bytes of the disk at each of the first offsets, as many as fit into directBytes.
// It reads them at once if there are many, because a disk answers many reads in little more time
// than one, and only the first one if there are few or the kernel cannot. The results are valid
// until the next read.
func (d *directDisk) readMany(bytes int, offsets []uint64) (parts [][]byte, err error) {
	size := wholePages(bytes)
	offsets = offsets[:min(len(offsets), directBytes/size)]
	if d.parts == nil && len(offsets) >= manyReads {
		d.parts, _ = blockdev.NewParts(d.file, directBytes/os.Getpagesize())
	}
	if d.parts == nil {
		b, err := d.read(bytes, offsets[0])
		return [][]byte{b}, err
	}
	if err := d.parts.Read(d.page[:len(offsets)*size], offsets); err != nil {
		return nil, err
	}
	for i := range offsets {
		parts = append(parts, d.page[i*size:][:bytes])
	}
	return parts, nil
}

// manyReads is how many reads take longer one after the other than a blockdev.Parts takes to begin
// and to end.
const manyReads = 16

// wholePages returns how many bytes a read past the cache takes for some bytes.
func wholePages(bytes int) int {
	page := os.Getpagesize()
	return (bytes + page - 1) / page * page
}
