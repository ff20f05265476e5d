package logwrites

import (
	"fmt"
	"io"
	"math/rand/v2"
)

// After says which writes after the last flush survive a power cut.
type After int

// None, some or all of the writes.
const (
	None After = iota
	Some       // the point's seed decides for each write: left out, done, or torn
	All
)

// String returns the name in lower case.
func (a After) String() string {
	if a < None || a > All {
		return fmt.Sprintf("After(%d)", int(a))
	}
	return [...]string{"none", "some", "all"}[a]
}

// Point is the moment of a power cut.
type Point struct {
	At    int64 // length of the record at that moment: an entry that ends later was not done
	After After
	Seed  uint64 // for Some
}

// piece is the size of the blocks, aligned to their size, that reach a disk whole or not at all.
const piece = 4096

// Replay writes the content of the disk after a cut at the point into image. image has size bytes,
// and must be as it was when the record began.
func Replay(image io.WriterAt, size int64, record io.ReaderAt, entries []Entry, p Point) error {
	flushed := 0 // number of entries before the last flush
	for i, e := range entries {
		if e.End > p.At {
			entries = entries[:i]
			break
		}
		if e.Flags&Flush != 0 {
			flushed = i
		}
	}
	random := rand.New(rand.NewPCG(p.Seed, 0))
	for i, e := range entries {
		if e.Bytes > size || e.Offset > size-e.Bytes {
			return fmt.Errorf("a write beyond the image's end, %d: %d bytes at %d", size, e.Bytes, e.Offset)
		}
		if err := apply(image, record, e, choose(random, p.After, i < flushed || e.Flags&FUA != 0)); err != nil {
			return fmt.Errorf("%d bytes at %d: %w", e.Bytes, e.Offset, err)
		}
	}
	return nil
}

// choose returns a function that decides which pieces of a write reach the disk.
func choose(random *rand.Rand, after After, durable bool) func() bool {
	all, none := func() bool { return true }, func() bool { return false }
	switch {
	case durable || after == All:
		return all
	case after == None:
		return none
	}
	switch random.IntN(3) {
	case 0:
		return all
	case 1:
		return none
	default:
		return func() bool { return random.IntN(2) == 0 }
	}
}

func apply(image io.WriterAt, record io.ReaderAt, e Entry, reaches func() bool) error {
	buffer := make([]byte, min(piece, e.Bytes))
	for done := int64(0); done < e.Bytes; {
		n := min(piece-(e.Offset+done)%piece, e.Bytes-done)
		if reaches() {
			if _, err := record.ReadAt(buffer[:n], e.Data+done); err != nil {
				return err
			}
			if _, err := image.WriteAt(buffer[:n], e.Offset+done); err != nil {
				return err
			}
		}
		done += n
	}
	return nil
}
