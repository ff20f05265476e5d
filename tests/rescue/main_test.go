package rescue

import (
	"fmt"
	"os"
	"testing"

	"github.com/directvol/directvol/tests/vm"
)

const miB = 1 << 20

var build vm.Build

func TestMain(m *testing.M) {
	var err error
	if build, err = vm.FindBuild(); err == nil {
		_, _, err = build.Rescue()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}
