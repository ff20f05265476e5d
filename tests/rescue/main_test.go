package rescue

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/directvol/directvol/tests/vm"
)

const (
	miB = 1 << 20
	// callLimit ends what hangs, as a base for vm.Limit.
	callLimit = 10 * time.Second
	// jobLimit is the same for what boots a VM.
	jobLimit = time.Minute
)

var build vm.Build

func TestMain(m *testing.M) {
	var err error
	build, err = vm.FindBuild()
	for _, product := range []string{"rescue-vmlinuz", "rescue.cpio"} {
		if err == nil {
			if _, missing := os.Stat(filepath.Join(build.Dir, product)); missing != nil {
				err = fmt.Errorf("build/%s is missing: run make rescue", product)
			}
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// within returns a context that ends with the test, or after base as vm.Limit has it.
func within(t *testing.T, base time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), vm.Limit(base))
	t.Cleanup(cancel)
	return ctx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
