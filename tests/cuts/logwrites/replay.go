package logwrites

import (
	"fmt"
	"io"
	"math/rand/v2"
)

// After says which writes behind the last flush a power cut has let through.
type After int

// None of them, Some or All.
const (
	None After = iota
	Some       // by the point's seed each is left out, done, or torn
	All
)

// String is the name as written here, in small letters.
func (a After) String() string {
	if a < None || a > All {
		return fmt.Sprintf("After(%d)", int(a))
	}
	return [...]string{"none", "some", "all"}[a]
}

// Point is a moment at which the power is cut.
type Point struct {
	At    int64 // how long the record was: an entry that ends behind it was not done
	After After
	Seed  uint64 // of Some
}

// piece is what reaches a disk whole or not at all, where it begins at a multiple.
const piece = 4096

// Replay writes into image, which is size bytes and as it was when the record
// began, what it holds after a cut at the point.
func Replay(image io.WriterAt, size int64, record io.ReaderAt, entries []Entry, p Point) error {
	flushed := 0 // how many entries are before the last flush
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

// choose returns which pieces of a write reach the disk.
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
