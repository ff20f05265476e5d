//go:build long

package volumes

import (
	"testing"

	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// The kernel is that of `make rescue`.
func TestEveryFaultIsAConditionOnTheNewerKernel(t *testing.T) {
	g := vmtest.Boot(t, vm.Options{Newer: true})
	provokesEach(t, g, false)
}
