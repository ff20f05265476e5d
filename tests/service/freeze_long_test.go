//go:build long

package service

import (
	"testing"

	"github.com/directvol/directvol/tests/vm/vmtest"
)

func TestVolumeOfEachOtherTypeIsThawedWhoeverDies(t *testing.T) {
	g := shared.Guest(t)
	for _, fstype := range []string{"btrfs", "ext3", "xfs"} {
		t.Run(fstype, func(t *testing.T) { isThawedWhoeverDies(t, g, fstype) })
	}
}

// The kernel is that of `make rescue`.
func TestVolumeIsThawedWhoeverDiesOnTheNewerKernel(t *testing.T) {
	newer := asService()
	newer.Newer = true
	g := vmtest.Boot(t, newer)
	for _, fstype := range []string{"btrfs", "ext3", "ext4", "xfs"} {
		t.Run(fstype, func(t *testing.T) { isThawedWhoeverDies(t, g, fstype) })
	}
}
