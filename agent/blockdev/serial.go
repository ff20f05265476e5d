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

// virtioSerial is the number of bytes of its serial that a virtio disk shows (VIRTIO_BLK_ID_BYTES,
// virtio 1.2, 5.2.6).
const virtioSerial = 20

// serial is a disk's serial; text is "" if the disk has none.
type serial struct {
	text string
	cut  bool // the serial may be longer than text
}

// is reports whether the serial is the promised one.
func (s serial) is(promised string) bool {
	return s.text == promised || s.cut && strings.HasPrefix(promised, s.text)
}

func (s serial) String() string {
	if s.text == "" {
		return "none"
	}
	return fmt.Sprintf("%q", s.text)
}

// serialOf returns the serial of a disk in sysfs; for a partition, that of its disk. A virtio disk
// is asked for its serial. For a SCSI disk, serialOf parses the unit serial number page (SPC, VPD
// page 80h), which the kernel has read when the disk appeared. An NVMe disk has the serial of its
// controller. root is "/" outside of tests.
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

// parseSerialPage parses {u8 type, u8 page code, u16 length, serial}, big-endian. The serial is
// padded with blanks.
func parseSerialPage(page []byte) string {
	if len(page) < 4 || page[1] != 0x80 {
		return ""
	}
	length := int(page[2])<<8 | int(page[3])
	return strings.TrimSpace(strings.TrimRight(string(page[4:min(4+length, len(page))]), "\x00"))
}

// asked holds the queries for serials in progress.
var asked flight.Flights[Device, serial]

// errOtherDisk means that a disk is not the promised one.
type errOtherDisk struct {
	device   Device
	has      serial
	promised string
}

func (e *errOtherDisk) Error() string {
	return fmt.Sprintf("%s has serial %v, not %q", e.device.Path, e.has, e.promised)
}

// promised returns the devices that have the serial text, or all devices if text is "". If none has
// the serial, the error is an errOtherDisk.
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

// refuseOther converts the error for a caller that has waited for the promised disk and found only
// another one.
func refuseOther(err error) error {
	if other, ok := errors.AsType[*errOtherDisk](err); ok {
		return errkind.New(errkind.FailedPrecondition, "the disk has another serial than the requested one: %w", other)
	}
	return err
}
