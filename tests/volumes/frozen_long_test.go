//go:build long

package volumes

import (
	"testing"

	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// The kernel is that of `make rescue`.
func TestFrozenVolumeGrowsAfterItsLeaseOnTheNewerKernel(t *testing.T) {
	everyFilesystemIn(t, vmtest.Boot(t, vm.Options{Newer: true}), growsAfterItsLease)
}
