// Package pcipath parses and formats PCI paths. A PCI path identifies a device by the slots on the
// way to it, not by bus numbers, because the guest chooses those: "02/01" is slot 1 behind the
// bridge in slot 2 of the root bus. A segment is SS or SS.F, slot and function in hexadecimal, like
// the last parts of the kernel's DDDD:BB:SS.F (PCI_SLOT and PCI_FUNC of linux/pci.h). A path of
// three or more segments may begin with the bus number of a separate root complex (QEMU's
// docs/pci_expander_bridge.txt): 0x20 or more, which is not a valid slot.
package pcipath

import (
	"fmt"
	"strconv"
	"strings"
)

// MaxSegments is the greatest number of segments. No machine is that deep.
const MaxSegments = 16

const (
	maxSlot     = 0x1f
	maxFunction = 7
	minRooted   = 3 // shorter paths never begin with a root bus
)

// Slot is one step of a path: a device and its function, on the bus to which the previous steps
// lead.
type Slot struct {
	Device   uint8 // 0 to 0x1f
	Function uint8 // 0 to 7
}

// Path leads from a root bus to a device, through one or more slots.
type Path struct {
	// RootBus is the number of the root bus: 0, or at least 0x20 for an expander bus (pxb). Its
	// name in sysfs is pci0000:RR.
	RootBus uint8
	Slots   []Slot
}

// Parse parses a path and checks that each number is valid in PCI.
func Parse(text string) (Path, error) {
	segments := strings.SplitN(text, "/", MaxSegments+1)
	if len(segments) > MaxSegments {
		return Path{}, fmt.Errorf("PCI path %.80q: more than %d segments", text, MaxSegments)
	}
	var p Path
	if len(segments) >= minRooted {
		if bus, ok := hex(segments[0], 2); ok && bus > maxSlot {
			p.RootBus, segments = bus, segments[1:]
		}
	}
	for _, segment := range segments {
		slot, err := parseSlot(segment)
		if err != nil {
			return Path{}, fmt.Errorf("PCI path %.80q: %w: it is written like 02/01, from the root bus down", text, err)
		}
		p.Slots = append(p.Slots, slot)
	}
	return p, nil
}

// String returns the path in the notation that Parse accepts, with two digits for each slot, and
// functions only if not 0.
func (p Path) String() string {
	var segments []string
	if p.RootBus != 0 {
		segments = append(segments, fmt.Sprintf("%02x", p.RootBus))
	}
	for _, slot := range p.Slots {
		segments = append(segments, strings.TrimSuffix(slot.String(), ".0"))
	}
	return strings.Join(segments, "/")
}

// String returns the slot in the notation that ends a device's name in sysfs, such as "02.0".
func (s Slot) String() string { return fmt.Sprintf("%02x.%x", s.Device, s.Function) }

func parseSlot(segment string) (Slot, error) {
	device, function, hasFunction := strings.Cut(segment, ".")
	var s Slot
	var ok bool
	if s.Device, ok = hex(device, 2); !ok || s.Device > maxSlot {
		return Slot{}, fmt.Errorf("segment %.20q: want a slot from 00 to %02x", segment, maxSlot)
	}
	if !hasFunction {
		return s, nil
	}
	if s.Function, ok = hex(function, 1); !ok || s.Function > maxFunction {
		return Slot{}, fmt.Errorf("segment %.20q: want a function from 0 to %d", segment, maxFunction)
	}
	return s, nil
}

// hex parses a hexadecimal number of at most so many digits.
func hex(digits string, most int) (uint8, bool) {
	if len(digits) > most {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 16, 8)
	return uint8(n), err == nil
}
