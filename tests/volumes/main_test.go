package volumes

import (
	"testing"

	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

const (
	callLimit = vmtest.CallLimit
	jobLimit  = vmtest.JobLimit
)

// Short names for functions that nearly every line of the tests uses.
var (
	must    = vmtest.Must
	limited = vmtest.Limited
	within  = vmtest.Within
)

var shared vmtest.Shared

func TestMain(m *testing.M) { shared.Main(m) }

// guest returns the guest that all tests share.
func guest(t *testing.T) *vm.Guest {
	t.Helper()
	return shared.Guest(t)
}
