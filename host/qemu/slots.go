package qemu

import (
	"fmt"

	"github.com/directvol/directvol/protocols/pcipath"
)

// Slots on the root bus; the package comment has a drawing. Slot 0 is the host bridge, 1f holds the
// ICH9's own devices.
const (
	firstBridgeSlot = 0x02
	maxBridges      = 9
	vsockSlot       = 0x10
	firstBootSlot   = 0x11
	maxBootDisks    = 0x1e - firstBootSlot + 1
	disksPerBridge  = 0x1e // slots 01 to 1e
)

// slot is a place for a disk: on bridge 1 and up, or on the root bus, which counts as bridge 0.
type slot struct{ bridge, device int }

// bus returns QEMU's name of the slot's bus.
func (s slot) bus() string {
	if s.bridge == 0 {
		return "pcie.0"
	}
	return fmt.Sprintf("b%d", s.bridge)
}

// address returns the slot's address on its bus.
func (s slot) address() string { return fmt.Sprintf("%#x", s.device) }

// path returns the slot's PCI path in the guest.
func (s slot) path() pcipath.Path {
	device := pcipath.Slot{Device: uint8(s.device)}
	if s.bridge == 0 {
		return pcipath.Path{Slots: []pcipath.Slot{device}}
	}
	return pcipath.Path{Slots: []pcipath.Slot{{Device: uint8(bridgeSlot(s.bridge))}, device}}
}

// bridgeSlot returns a bridge's slot on the root bus.
func bridgeSlot(bridge int) int { return firstBridgeSlot + bridge - 1 }

// freeSlot returns a free slot behind the bridges: a slot that was never used, or else the slot
// that was freed longest ago. The guest may still be busy with a slot's previous disk (after two
// ACPI ejects in a row, the guest removed the new disk). freed contains the number of the release
// that freed each slot.
func freeSlot(bridges int, taken map[slot]bool, freed map[slot]uint64) (slot, error) {
	var best slot
	for bridge := 1; bridge <= bridges; bridge++ {
		for device := 1; device <= disksPerBridge; device++ {
			if s := (slot{bridge, device}); !taken[s] && (best == slot{} || freed[s] < freed[best]) {
				best = s
			}
		}
	}
	if best != (slot{}) {
		return best, nil
	}
	return slot{}, fmt.Errorf("all %d hotplug slots are taken: detach a disk, or start the VM with more than %d bridges (at most %d)",
		bridges*disksPerBridge, bridges, maxBridges)
}
