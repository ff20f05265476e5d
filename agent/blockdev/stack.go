package blockdev

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/directvol/directvol/agent/errkind"
)

// Stack is a device-mapper device and what is below it, down to the disk, as it was when it was
// read. It holds no key and no open file.
//
//	dm-0  crypt: the disk from sector 32768 on  ← a filesystem is here
//	vda   the disk                              ← the host grows this
//
// Fixed is why the mappings cannot grow, with the name of one and what would grow it; nil if they
// can. If that has been done, the volume can grow in them.
type Stack struct {
	Disk   Device // at the bottom; zero if the lower layers are not known
	Fixed  error
	layers []layer // from the top down; none if one of them is not understood
}

// layer is a mapping whose last target maps the end of the device below it. It grows by that
// target. Lengths are in sectors of 512 bytes.
type layer struct {
	device Device
	below  uint64 // the dev_t of the device that the last target maps
	start  uint64 // where the last target begins in the mapping
	length uint64 // of the last target
	offset uint64 // where it begins on the device below
	grain  uint64 // its length is a multiple of this
	fixed  error  // why it cannot grow, or nil
}

// maxLayers is more than anybody stacks.
const maxLayers = 8

// IsMapping reports whether the device belongs to the device-mapper, which names its devices itself
// (alloc_dev in drivers/md/dm.c).
func (d Device) IsMapping() bool {
	number, is := strings.CutPrefix(d.Name, "dm-")
	_, err := strconv.ParseUint(number, 10, 32)
	return is && err == nil
}

// StackOf reads the mappings from a device down to its disk. A suspended mapping is a
// FailedPrecondition that says what resumes it; if a device below one is gone, the error wraps
// fs.ErrNotExist. StackOf sends no request to a disk.
func StackOf(top Device) (Stack, error) {
	var s Stack
	for at := top; ; {
		if !at.IsMapping() {
			s.Disk = at
			s.fix(refuseBottom("/", at))
			return s, nil
		}
		if len(s.layers) == maxLayers {
			return Stack{Fixed: errkind.New(errkind.FailedPrecondition, "more than %d mappings lie below %s: grow the lower ones with dmsetup", maxLayers, top.Path)}, nil
		}
		var one layer
		var unknown error
		err := withTable(at.Number, func(_ *os.File, t table) error {
			one, unknown = layerOf(at, t)
			return refuseSuspended(at, t)
		})
		if err != nil {
			return Stack{}, err
		}
		if unknown != nil {
			return Stack{Fixed: unknown}, nil
		}
		s.fix(one.fixed)
		below, err := ByNumber(one.below)
		if err != nil {
			return Stack{}, err
		}
		if others := holders("/", one.below); len(others) > 1 {
			s.fix(errkind.New(errkind.FailedPrecondition, "%s is only one of the mappings on %s (%s), which may use the space behind it: grow it with the tool that made them, such as lvextend, then the volume with size 0",
				at.Path, below.Path, strings.Join(others, ", ")))
		}
		one.grain = max(one.grain, logicalSectors("/", at.Number))
		s.layers = append(s.layers, one)
		at = below
	}
}

// fix sets Fixed to the first error.
func (s *Stack) fix(why error) {
	if s.Fixed == nil {
		s.Fixed = why
	}
}

// refuseBottom refuses the lowest device of a stack if it does not grow with the host's disk, or
// has other users. root is "/" outside of tests.
func refuseBottom(root string, d Device) error {
	if parts, _ := filepath.Glob(filepath.Join(numberDir(root, d.Number), "*", "partition")); len(parts) > 0 {
		return errkind.New(errkind.FailedPrecondition, "%s has partitions, which may use the space behind the mapping: grow the mapping with the tool that made it, then the volume with size 0", d.Path)
	}
	if part, ok := PartitionOf(root, d.Number); ok {
		return errkind.New(errkind.FailedPrecondition, "%s is a partition of %s: grow the partition first (growpart, or sfdisk), then the mappings on it", d.Path, part.Disk)
	}
	if parts := names(filepath.Join(numberDir(root, d.Number), "slaves")); len(parts) > 0 {
		return errkind.New(errkind.FailedPrecondition, "%s is made of %s: grow it with the tool that made it, such as mdadm --grow", d.Path, strings.Join(parts, ", "))
	}
	return nil
}

// holders returns the names of the devices that are made of the device with a dev_t
// (Documentation/ABI/testing/sysfs-block: holders).
func holders(root string, number uint64) []string {
	return names(filepath.Join(numberDir(root, number), "holders"))
}

func names(dir string) (found []string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		found = append(found, e.Name())
	}
	return found
}

// logicalSectors returns the device's logical block in sectors; 1 if it is not known.
func logicalSectors(root string, number uint64) uint64 {
	block, err := readCount(filepath.Join(numberDir(root, number), "queue/logical_block_size"))
	if err != nil {
		return 1
	}
	return max(block/sectorBytes, 1)
}

// refuseSuspended refuses a mapping to which every request waits.
func refuseSuspended(d Device, t table) error {
	if t.flags&dmSuspended == 0 {
		return nil
	}
	return errkind.New(errkind.FailedPrecondition, "%s (%.128q) is suspended, and every request to it waits: dmsetup resume %.128q, or cryptsetup luksResume %.128q", d.Path, t.name, t.name, t.name)
}

// layerOf returns how a mapping grows. The error is a FailedPrecondition for one that is not
// understood.
func layerOf(d Device, t table) (layer, error) {
	refusal := func(format string, args ...any) error {
		return errkind.New(errkind.FailedPrecondition, "%s (%.128q) "+format, append([]any{d.Path, t.name}, args...)...)
	}
	remedy := fmt.Sprintf("grow it with dmsetup (suspend, reload with a longer table, resume), then grow the volume with size 0: dmsetup table %.128q", t.name)
	if len(t.targets) == 0 {
		return layer{}, refusal("has no table: %s", remedy)
	}
	ends := make([]layer, len(t.targets))
	for i, one := range t.targets {
		var why string
		if ends[i], why = parseTarget(one); why != "" {
			return layer{}, refusal("cannot grow here, %s", strings.ReplaceAll(why, "NAME", strconv.Quote(t.name)))
		}
	}
	end := ends[len(ends)-1]
	end.device = d
	owner, key := refuseOwner(d, t.uuid), refuseCrypt(t.targets)
	switch {
	case owner != "":
		end.fixed = refusal("%s", owner)
	case t.flags&dmReadOnly != 0:
		end.fixed = refusal("is read-only: make it anew, writable")
	case key != "":
		end.fixed = refusal("cannot grow here, %s", strings.ReplaceAll(key, "NAME", strconv.Quote(t.name)))
	}
	for i, one := range ends[:len(ends)-1] {
		if end.fixed == nil && one.below == end.below && one.offset+t.targets[i].length > end.offset {
			end.fixed = refusal("maps the space behind its last target: %s", remedy)
		}
	}
	return end, nil
}

// refuseOwner refuses a mapping whose maker, by its UUID, uses or may use the space behind it.
func refuseOwner(d Device, uuid string) (why string) {
	maker, rest, _ := strings.Cut(uuid, "-")
	switch {
	case maker == "LVM":
		return "belongs to LVM, which keeps its own record of the space: run pvresize on the disk and lvextend -l +100%FREE " + d.Path + ", then grow the volume with size 0"
	case strings.HasPrefix(maker, "part"): // by kpartx
		return "is a mapping of a partition: grow the partition (growpart, or sfdisk), and the mapping with kpartx -u, then the volume with size 0"
	case maker == "CRYPT" && !strings.HasPrefix(rest, "LUKS") && !strings.HasPrefix(rest, "PLAIN-"): // such as TCRYPT, with a header behind the data
		return "is encrypted in a format whose end the agent does not know: copy its files to a larger disk"
	}
	return ""
}

// parseTarget parses a target that can be lengthened (Documentation/admin-guide/device-mapper/
// linear.rst and dm-crypt.rst), or returns why it cannot. Nothing that it returns quotes a
// parameter, because one of them is the key.
func parseTarget(t target) (l layer, why string) {
	fields, at := bytes.Fields(t.params), 0
	l = layer{start: t.start, length: t.length, grain: 1}
	switch t.kind {
	case "linear":
	case "crypt":
		if at = 3; len(fields) < 5 {
			return layer{}, "its table is not understood"
		}
		if l.grain = grainOf(fields[5:]); l.grain == 0 {
			return layer{}, "its table is not understood"
		}
	default:
		return layer{}, fmt.Sprintf("its target %.16q maps no single run of a disk: grow it with the tool that made it, such as lvextend, or with dmsetup (suspend, reload, resume): dmsetup table NAME", t.kind)
	}
	if len(fields) < at+2 || t.kind == "linear" && len(fields) != 2 {
		return layer{}, "its table is not understood"
	}
	below, err := ParseNumber(string(fields[at]))
	offset, err2 := strconv.ParseUint(string(fields[at+1]), 10, 64)
	if err != nil || err2 != nil || offset > maxSectors {
		return layer{}, "its table is not understood"
	}
	l.below, l.offset = below, offset
	return l, ""
}

// refuseCrypt refuses encrypted targets whose table the agent could not load again: CIPHER KEY
// IV_OFFSET DEVICE OFFSET [COUNT OPTION…].
func refuseCrypt(targets []target) (why string) {
	for _, t := range targets {
		fields := bytes.Fields(t.params)
		if t.kind != "crypt" || len(fields) < 5 {
			continue
		}
		switch key := fields[1]; {
		case key[0] == ':':
			return "its key is in the keyring of the process that opened it: cryptsetup resize NAME, then grow the volume again; or open it with cryptsetup --disable-keyring"
		case len(key) == 1 && key[0] == '-':
			return "its key was wiped: cryptsetup luksResume NAME"
		}
		if slices.ContainsFunc(fields[5:], func(option []byte) bool { return bytes.HasPrefix(option, []byte("integrity:")) }) {
			return "it has integrity tags: cryptsetup resize NAME, then grow the volume with size 0"
		}
	}
	return ""
}

// grainOf returns the encryption's sector, in sectors of 512 bytes, by the options of a target; 0
// if it is not understood.
func grainOf(options [][]byte) uint64 {
	grain := uint64(1)
	for _, option := range options {
		if size, is := bytes.CutPrefix(option, []byte("sector_size:")); is {
			sector, err := strconv.ParseUint(string(size), 10, 32)
			if err != nil || sector%sectorBytes != 0 {
				return 0
			}
			grain = sector / sectorBytes
		}
	}
	return grain
}

// Usable returns how many bytes the stack's top has above a disk of some bytes, if every mapping
// reaches as far as it can. It is the disk's size less what the layers keep for themselves, as far
// as they are understood.
func (s Stack) Usable(disk uint64) uint64 {
	size := disk / sectorBytes
	for _, l := range slices.Backward(s.layers) {
		size = l.start + l.room(size)
	}
	return size * sectorBytes
}

// room returns how long the last target can be on a device with sectors sectors.
func (l layer) room(sectors uint64) uint64 {
	if sectors < l.offset {
		return 0
	}
	return (sectors - l.offset) / l.grain * l.grain
}

// Has reports whether a sector of the disk is known to belong to the stack's top.
func (s Stack) Has(sector uint64) bool {
	if len(s.layers) == 0 {
		return false
	}
	for _, l := range slices.Backward(s.layers) {
		if sector < l.offset || sector-l.offset >= l.length {
			return false // or it belongs to an earlier target
		}
		sector = l.start + sector - l.offset
	}
	return true
}

// Below returns the names of the devices that a mapping is made of, at any depth. It sends no
// request to a disk. root is "/" outside of tests.
func Below(root string, number uint64) (found []string) {
	return below(root, number, maxLayers)
}

func below(root string, number uint64, depth int) (found []string) {
	dir := filepath.Join(numberDir(root, number), "slaves")
	if depth == 0 {
		return nil
	}
	for _, name := range names(dir) {
		found = append(found, name)
		text, err := os.ReadFile(filepath.Join(dir, name, "dev"))
		if err != nil {
			continue
		}
		if n, err := ParseNumber(string(text)); err == nil {
			found = append(found, below(root, n, depth-1)...)
			if part, is := PartitionOf(root, n); is {
				found = append(found, part.Disk)
			}
		}
	}
	return found
}

// Reach returns how many bytes the device has on its disk, without opening it; 0 if that is not
// known. If the disk below a mapping has become smaller, these are less than the mapping's size.
func (d Device) Reach() uint64 {
	size := Bytes("/", d.Number)
	if size == 0 || !d.IsMapping() {
		return size
	}
	s, err := StackOf(d)
	if err != nil || len(s.layers) == 0 {
		return size
	}
	return min(size, s.Usable(Bytes("/", s.Disk.Number)))
}

// Room returns Usable of the disk's present size.
func (s Stack) Room() (uint64, error) {
	disk, err := s.Disk.Size()
	return s.Usable(disk), err
}

// Grow makes every mapping reach as far as the disk's present size allows, from the bottom up. It
// changes nothing that is as long already, or longer. It may block as long as the disk does. The
// caller checks Fixed before.
func (s Stack) Grow() error {
	disk, err := s.Disk.Size()
	if err != nil {
		return err
	}
	size := disk / sectorBytes
	for _, l := range slices.Backward(s.layers) {
		goal := l.room(size)
		if err := l.grow(goal); err != nil {
			return fmt.Errorf("grow the mapping %s: %w", l.device.Path, err)
		}
		if size = Bytes("/", l.device.Number) / sectorBytes; size < l.start+goal {
			return errkind.New(errkind.Internal, "the mapping %s has %d bytes, not %d, although the kernel reported success", l.device.Path, size*sectorBytes, (l.start+goal)*sectorBytes)
		}
	}
	return nil
}

// grow makes the last target sectors long, if the mapping is still as it was and shorter.
func (l layer) grow(sectors uint64) error {
	return withTable(l.device.Number, func(control *os.File, t table) error {
		now, err := layerOf(l.device, t)
		if err == nil {
			err = cmp.Or(refuseSuspended(l.device, t), now.fixed)
		}
		if err != nil {
			return err
		}
		if now.below != l.below || now.start != l.start || now.offset != l.offset {
			return errkind.New(errkind.DeadlineExceeded, "somebody else has changed its table; try again")
		}
		if last := t.targets[len(t.targets)-1]; last.length >= sectors {
			return nil
		}
		return lengthen(control, l.device.Number, t, sectors)
	})
}
