package service

import (
	"testing"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

const (
	kiB = 1 << 10
	miB = 1 << 20
)

// shared is a guest whose init starts the agent as a service, and starts it again whenever it has
// ended. A service does not power off, so the guest is killed.
var shared = vmtest.Shared{
	Options: func(*testing.T) vm.Options { return asService() },
	End: func(g *vm.Guest) error {
		g.Kill()
		return g.Close()
	},
}

func TestMain(m *testing.M) { shared.Main(m) }

func asService() vm.Options {
	return vm.Options{Append: remote.AsService + " agent.directvol.resize_wait=" + vm.Limit(vmtest.CallLimit).String()}
}
