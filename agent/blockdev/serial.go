package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/flight"
)

// virtioSerial is how many bytes of its serial a virtio disk shows (VIRTIO_BLK_ID_BYTES,
// virtio 1.2, 5.2.6).
const virtioSerial = 20

// serial is a disk's own name for itself, "" where it has none.
type serial struct {
	text string
	cut  bool // there may be more of it
}

// is reports whether a disk has the serial that was promised.
func (s serial) is(promised string) bool {
	return s.text == promised || s.cut && strings.HasPrefix(promised, s.text)
}

func (s serial) String() string {
	if s.text == "" {
		return "none"
	}
	return fmt.Sprintf("%q", s.text)
}

// serialOf reads the serial of a disk in sysfs, or of the disk that has a partition: of a
// virtio disk, which is asked for it, of a SCSI disk's unit serial number page (SPC, VPD
// page 80h), which the kernel has read when it came, and of an NVMe controller. root is
// "/" outside of tests.
func serialOf(root, name string) serial {
	dir, err := filepath.EvalSymlinks(filepath.Join(root, "sys/class/block", name))
	if err != nil {
		return serial{}
	}
	if _, err := os.Stat(filepath.Join(dir, "partition")); err == nil {
		dir = filepath.Dir(dir)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "serial")); err == nil {
		return serial{strings.TrimSpace(string(text)), len(text) >= virtioSerial}
	}
	if page, err := os.ReadFile(filepath.Join(dir, "device/vpd_pg80")); err == nil {
		return serial{text: parseSerialPage(page)}
	}
	text, _ := os.ReadFile(filepath.Join(dir, "device/serial"))
	return serial{text: strings.TrimSpace(string(text))}
}

// parseSerialPage reads {u8 type, u8 page code, u16 length, serial}, big-endian; the
// serial is filled up with blanks.
func parseSerialPage(page []byte) string {
	if len(page) < 4 || page[1] != 0x80 {
		return ""
	}
	length := int(page[2])<<8 | int(page[3])
	return strings.TrimSpace(strings.TrimRight(string(page[4:min(4+length, len(page))]), "\x00"))
}

// asked are the disks that are asked for their serial.
var asked flight.Flights[Device, serial]

// errOtherDisk is of a disk that is not the promised one.
type errOtherDisk struct {
	device   Device
	has      serial
	promised string
}

func (e *errOtherDisk) Error() string {
	return fmt.Sprintf("%s has serial %v, and not %q", e.device.Path, e.has, e.promised)
}

// promised returns those devices that have a serial; all where none was promised. Its
// error is an errOtherDisk where none of them has it.
func promised(ctx context.Context, devices []Device, text string) (those []Device, err error) {
	if text == "" {
		return devices, nil
	}
	for _, d := range devices {
		has, ok := asked.Ask(ctx, d, func() serial { return serialOf("/", d.Name) })
		switch {
		case !ok:
			err = fmt.Errorf("%s does not answer with its serial: %w", d.Path, context.Cause(ctx))
		case has.is(text):
			those = append(those, d)
		default:
			err = &errOtherDisk{d, has, text}
		}
	}
	if len(those) > 0 {
		return those, nil
	}
	return nil, err
}

// refuseOther is the answer to who has waited for the promised disk, and found another
// one to the end.
func refuseOther(err error) error {
	if other, ok := errors.AsType[*errOtherDisk](err); ok {
		return errkind.New(errkind.FailedPrecondition, "the disk is not the promised one: %w", other)
	}
	return err
}
