package health

import (
	"bytes"
	"context"
	"errors"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
)

// kmsgRecord is more than the kernel puts into one record (PRINTK_MESSAGE_MAX
// in kernel/printk/internal.h); a shorter buffer gets EINVAL.
const kmsgRecord = 8192

// followKmsg calls each with every message that the kernel itself logs from now
// on (Documentation/ABI/testing/dev-kmsg), or behind the record of a number other
// than 0, and with nil where some were overwritten before they were read, and
// at the end from which it begins. It returns when ctx ends.
func followKmsg(ctx context.Context, after uint64, each func(sequence uint64, message []byte)) error {
	file, err := os.OpenFile("/dev/kmsg", os.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	if after == 0 {
		if after, err = skipKmsg(file); err != nil {
			return err
		}
		each(after, nil)
	}
	stop := context.AfterFunc(ctx, func() { file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, kmsgRecord)
	for {
		n, err := file.Read(buf)
		switch {
		case err == nil:
			sequence := sequenceOf(buf[:n])
			if message, ok := messageOf(buf[:n]); ok && sequence > after {
				each(sequence, message)
			}
		case errors.Is(err, unix.EPIPE):
			each(0, nil)
		case ctx.Err() != nil:
			return ctx.Err()
		default:
			return err
		}
	}
}

// skipKmsg reads to the log's end, and returns the number of its last record.
func skipKmsg(file *os.File) (last uint64, err error) {
	err = readKmsg(file, func(record []byte) { last = sequenceOf(record) })
	return last, err
}

// messageOf returns the text of a record "PRIORITY,…;text\n KEY=value\n…", and
// whether the kernel is its author: any process with the right may write to the
// log, but not as facility 0.
func messageOf(record []byte) (text []byte, kernels bool) {
	prefix, text, _ := bytes.Cut(record, []byte{';'})
	text, _, _ = bytes.Cut(text, []byte{'\n'})
	number, _, _ := bytes.Cut(prefix, []byte{','})
	priority, err := strconv.ParseUint(string(number), 10, 32)
	return text, err == nil && priority>>3 == 0
}

// sequenceOf returns the number of a record "PRIORITY,NUMBER,…;text", or 0 where
// it has none. The kernel's first is 0 too, and comes before any disk's.
func sequenceOf(record []byte) uint64 {
	prefix, _, _ := bytes.Cut(record, []byte{';'})
	_, rest, _ := bytes.Cut(prefix, []byte{','})
	number, _, _ := bytes.Cut(rest, []byte{','})
	sequence, err := strconv.ParseUint(string(number), 10, 64)
	if err != nil {
		return 0
	}
	return sequence
}

// line is what a message of the kernel's says of a block device.
type line struct {
	device  string // the kernel's name
	request bool   // it tells of a request that has failed, at a sector
	sector  uint64 // of the whole disk, which such a line names for a partition too
	read    bool   // a read of it has failed
	write   bool   // a write or a flush of it has
	stopped bool   // its ext4 has made itself read-only
	// remounted says that somebody has changed its mount since.
	remounted bool
	shrunk    bool   // it has got a smaller size
	sectors   uint64 // which is this, in units of 512 bytes
}

// Messages that name a device, each from its first word on: elsewhere a name may be any
// program's, in a line about its fault (show_signal_msg in arch/x86/mm/fault.c). A
// program's name has 15 bytes at most and "[" behind it, so none passes for a failed
// request.
var (
	// blk_print_req_error in block/blk-mq.c, with a function's name before Linux 5.16.
	requestError = regexp.MustCompile(`^(?:[a-z_]+: )?[A-Za-z/ ]+ error, dev ([^ ,]+), sector ([0-9]+) op (0x[0-9a-f]+):`)
	// buffer_io_error in fs/buffer.c.
	bufferError = regexp.MustCompile(`^Buffer I/O error on dev(?:ice)? ([^ ,]+), `)
	// XFS (vda): …, EXT4-fs error (device vda): …, EXT4-fs (vda): …
	filesystemLine = regexp.MustCompile(`^[A-Za-z0-9-]+(?: [a-z]+)? \((?:device )?([^ ()]+)\): `)
	// __jbd2_journal_abort_hard's in fs/jbd2/journal.c; a journal is called after its device and its inode.
	journalLine = regexp.MustCompile(`^(?:Aborting journal on device|JBD2: .* (?:on|for|of)) ([^ ]+)-[0-9]+\.?`)
	// set_capacity_and_notify in block/genhd.c
	sizeLine = regexp.MustCompile(`^([a-z0-9!-]+): detected capacity change from ([0-9]+) to ([0-9]+)$`)
	// any other line of a device's
	deviceLine = regexp.MustCompile(`^([a-z0-9!-]+): `)
)

// Of enum req_op in include/linux/blk_types.h, those with which bytes are lost: a discard
// may fail.
const opRead, opWrite, opFlush = "0x0", "0x1", "0x2"

// concern is whether a line of the kernel's log is about a device.
type concern int

const (
	no    concern = iota
	maybe         // it is about the disk of which this is a partition
	yes
)

// concerns tells whether a line is about a device. A request that has failed is logged with
// its whole disk's name and sector, so that another partition's error is told from this
// one's by where it lies.
func (l line) concerns(name string, partition func() (blockdev.Partition, bool)) concern {
	if l.device == name {
		return yes
	}
	if l.device == "" || !strings.HasPrefix(name, l.device) {
		return no
	}
	part, known := partition()
	switch {
	case part.Disk != l.device:
		return no
	case !l.request || !known:
		return maybe
	case part.Has(l.sector):
		return yes
	}
	return no
}

// parseLine returns what a message says, of no device where it names none.
func parseLine(message []byte) line {
	if found := requestError.FindSubmatch(message); found != nil {
		op := string(found[3])
		sector, err := strconv.ParseUint(string(found[2]), 10, 64)
		return line{device: string(found[1]), request: err == nil, sector: sector, read: op == opRead, write: op == opWrite || op == opFlush}
	}
	if found := filesystemLine.FindSubmatch(message); found != nil {
		said := message[len(found[0]):]
		return line{
			device:  string(found[1]),
			stopped: bytes.HasPrefix(message, []byte("EXT4-fs (")) && bytes.HasPrefix(said, []byte("Remounting filesystem read-only")),
			// ext4_remount's in fs/ext4/super.c
			remounted: bytes.HasPrefix(said, []byte("re-mounted")),
		}
	}
	if found := sizeLine.FindSubmatch(message); found != nil {
		before, err := strconv.ParseUint(string(found[2]), 10, 64)
		sectors, err2 := strconv.ParseUint(string(found[3]), 10, 64)
		return line{device: string(found[1]), shrunk: errors.Join(err, err2) == nil && sectors < before, sectors: sectors}
	}
	for _, form := range []*regexp.Regexp{bufferError, journalLine, deviceLine} {
		if found := form.FindSubmatch(message); found != nil {
			return line{device: string(found[1])}
		}
	}
	return line{}
}
