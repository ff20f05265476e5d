package vsock

import (
	"testing"

	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

const (
	kiB = 1 << 10
	miB = 1 << 20
)

// shared is a guest whose kernel supports vsock connections inside the guest.
var shared = vmtest.Shared{Options: func(t *testing.T) vm.Options {
	return vm.Options{Image: vmtest.Image(t, []string{"vsock_loopback"})}
}}

func TestMain(m *testing.M) { shared.Main(m) }
