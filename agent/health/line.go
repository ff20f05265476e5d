package health

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/directvol/directvol/agent/blockdev"
)

// line is the content of a kernel message about a block device.
type line struct {
	device  string // the kernel's name
	request bool   // it reports a failed request, at a sector
	sector  uint64 // of the whole disk, even if the device is a partition
	read    bool   // a read failed
	write   bool   // a write or a flush failed
	stopped bool   // the device's ext4 or btrfs has made itself read-only
	failed  bool   // a filesystem or the page cache says that an I/O has failed
	// remounted is set if somebody has remounted the filesystem.
	remounted bool
	shrunk    bool   // the device's size has decreased
	before    uint64 // the earlier size, in units of 512 bytes
	sectors   uint64 // the new size
}

// Values of enum req_op in include/linux/blk_types.h whose failure loses bytes; a failed discard
// does not.
const opRead, opWrite, opFlush = "0x0", "0x1", "0x2"

// concern is whether a line of the kernel's log is about a device.
type concern int

const (
	no    concern = iota
	maybe         // it is about the disk of this partition or below this mapping
	yes
)

// concernsDevice is concerns for a device of this kernel.
func (l line) concernsDevice(d blockdev.Device) concern {
	if about := l.concerns(d.Name, func() (blockdev.Partition, bool) { return blockdev.PartitionOf("/", d.Number) }); about != no || !d.IsMapping() {
		return about
	}
	return l.concernsMapping(func() []string { return blockdev.Below("/", d.Number) }, func(sector uint64) bool {
		stack, err := blockdev.StackOf(d)
		return err == nil && stack.Has(sector)
	})
}

// concerns reports whether a line is about a device. The kernel logs a failed request with the name
// and the sector of the whole disk, so the sector tells which partition has failed.
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

// concernsMapping is concerns for a mapping of the device-mapper. The kernel logs a failed request
// with the name of the disk. below are the devices that the mapping is made of, and has reports
// whether a sector of the disk is known to belong to it.
func (l line) concernsMapping(below func() []string, has func(sector uint64) bool) concern {
	switch {
	case l.device == "" || !slices.Contains(below(), l.device):
		return no
	case l.request && has(l.sector):
		return yes
	}
	return maybe
}

// parseLine parses a message. Its device is "" if the message names none.
//
// Each form is compared from the first word on, because elsewhere a name may be any program's, in a
// line about the program's fault (show_signal_msg in arch/x86/mm/fault.c). A program's name has at
// most 15 bytes and is followed by "[", so no such line has the form of a failed request.
func parseLine(message []byte) line {
	text := string(message)
	for _, parse := range []func(string) (line, bool){requestLine, filesystemLine, sizeLine} {
		if l, ok := parse(text); ok {
			return l
		}
	}
	if device, ok := bufferLine(text); ok {
		return line{device: device, failed: true}
	}
	if device, ok := journalLine(text); ok {
		return line{device: device}
	}
	if device, ok := deviceLine(text); ok {
		// from iomap_finish_ioend in fs/iomap/buffered-io.c, for an xfs
		return line{device: device, failed: strings.HasPrefix(text[len(device):], ": writeback error ")}
	}
	return line{}
}

const (
	digits = "0123456789"
	lower  = "abcdefghijklmnopqrstuvwxyz"
	upper  = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	// deviceNames are the bytes of a block device's name. A "/" in it is printed as "!".
	deviceNames = lower + digits + "!-"
)

// isOnly reports whether a text consists of the bytes of set. An empty text does not.
func isOnly(text, set string) bool { return text != "" && strings.Trim(text, set) == "" }

// isWithout reports whether a text is not empty and has none of the bytes of set.
func isWithout(text, set string) bool { return text != "" && !strings.ContainsAny(text, set) }

// requestLine parses "I/O error, dev vda, sector 8 op 0x1:…" (blk_print_req_error in
// block/blk-mq.c), with a function's name before it up to Linux 5.15.
func requestLine(text string) (l line, ok bool) {
	kind, rest, is := strings.Cut(text, " error, dev ")
	device, rest, hasSector := strings.Cut(rest, ", sector ")
	sector, rest, hasOp := strings.Cut(rest, " op ")
	op, _, hasEnd := strings.Cut(rest, ":")
	hex, isHex := strings.CutPrefix(op, "0x")
	if function, after, has := strings.Cut(kind, ": "); has && isOnly(function, lower+"_") {
		kind = after
	}
	if !is || !hasSector || !hasOp || !hasEnd || !isHex ||
		!isOnly(kind, lower+upper+"/ ") || !isWithout(device, " ,") || !isOnly(sector, digits) || !isOnly(hex, digits+"abcdef") {
		return line{}, false
	}
	number, err := strconv.ParseUint(sector, 10, 64)
	return line{device: device, request: err == nil, sector: number, read: op == opRead, write: op == opWrite || op == opFlush}, true
}

// filesystemLine parses "XFS (vda): …", "EXT4-fs error (device vda): …", "EXT4-fs (vda): …" and
// "BTRFS info (device vda: state E): …" (_btrfs_printk in fs/btrfs/messages.c).
func filesystemLine(text string) (l line, ok bool) {
	before, rest, hasDevice := strings.Cut(text, " (")
	device, said, hasEnd := strings.Cut(rest, "): ")
	device, state, hasState := strings.Cut(strings.TrimPrefix(device, "device "), ": state ")
	name, kind, hasKind := strings.Cut(before, " ")
	if !hasDevice || !hasEnd || !isOnly(name, lower+upper+digits+"-") || hasKind && !isOnly(kind, lower) || hasState && !isOnly(state, upper) || !isWithout(device, " ()") {
		return line{}, false
	}
	return line{
		device: device,
		stopped: strings.HasPrefix(text, "EXT4-fs (") && strings.HasPrefix(said, "Remounting filesystem read-only") ||
			strings.HasPrefix(text, "BTRFS ") && strings.HasPrefix(said, "forced readonly"),
		// from ext4_remount in fs/ext4/super.c
		remounted: strings.HasPrefix(said, "re-mounted"),
		failed:    strings.Contains(said, "I/O error"),
	}, true
}

// sizeLine parses "vda: detected capacity change from 8 to 16" (set_capacity_and_notify in
// block/genhd.c).
func sizeLine(text string) (l line, ok bool) {
	device, rest, is := strings.Cut(text, ": detected capacity change from ")
	from, to, hasTo := strings.Cut(rest, " to ")
	if !is || !hasTo || !isOnly(device, deviceNames) || !isOnly(from, digits) || !isOnly(to, digits) {
		return line{}, false
	}
	before, err := strconv.ParseUint(from, 10, 64)
	sectors, err2 := strconv.ParseUint(to, 10, 64)
	// A SCSI disk gets the size 0 while its size is not known (sd_revalidate_disk in
	// drivers/scsi/sd.c).
	return line{device: device, shrunk: errors.Join(err, err2) == nil && sectors != 0 && sectors < before, before: before, sectors: sectors}, true
}

// bufferLine returns the device of "Buffer I/O error on dev vda, …" (buffer_io_error in
// fs/buffer.c).
func bufferLine(text string) (device string, ok bool) {
	rest, is := strings.CutPrefix(text, "Buffer I/O error on dev")
	rest, isDevice := strings.CutPrefix(strings.TrimPrefix(rest, "ice"), " ")
	device, _, hasEnd := strings.Cut(rest, ", ")
	return device, is && isDevice && hasEnd && isWithout(device, " ,")
}

// journalLine returns the device of "Aborting journal on device vda-8." and of "JBD2: … for vda-8."
// (__jbd2_journal_abort_hard and others in fs/jbd2/journal.c).
func journalLine(text string) (device string, ok bool) {
	if journal, is := strings.CutPrefix(text, "Aborting journal on device "); is {
		return deviceOfJournal(journal)
	}
	rest, is := strings.CutPrefix(text, "JBD2: ")
	words := strings.Split(rest, " ")
	for at := len(words) - 1; is && at > 1; at-- { // the last name counts
		switch words[at-1] {
		case "on", "for", "of":
			if device, ok := deviceOfJournal(words[at]); ok {
				return device, true
			}
		}
	}
	return "", false
}

// deviceOfJournal returns the device in a journal's name, which ends with the number of the
// journal's inode.
func deviceOfJournal(text string) (device string, ok bool) {
	name, _, _ := strings.Cut(text, " ")
	for at := strings.LastIndex(name, "-"); at > 0; at = strings.LastIndex(name[:at], "-") {
		if at+1 < len(name) && isOnly(name[at+1:at+2], digits) {
			return name[:at], true
		}
	}
	return "", false
}

// deviceLine returns the device of any other line that starts with a device's name.
func deviceLine(text string) (device string, ok bool) {
	device, _, is := strings.Cut(text, ": ")
	return device, is && isOnly(device, deviceNames)
}
