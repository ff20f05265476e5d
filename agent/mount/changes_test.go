package mount

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/directvol/directvol/agent/mount/mounttest"
)

func TestEachChangeOfTheMountsIsCounted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it mounts: run it as root")
	}
	dir := mounttest.Dir(t)
	var changes Changes
	if n := changes.Now(); n != 0 {
		t.Errorf("while nobody counts\nwant 0\ngot  %d", n)
	}
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- changes.Follow(ctx) }()
	mounttest.Await(t, "somebody counts", func() bool { return changes.Now() != 0 })
	for range 20 {
		for _, change := range []func(){
			func() { mounttest.Mount(t, "changes", dir, "tmpfs", 0, "") },
			func() { mounttest.Unmount(t, dir) },
		} {
			before := changes.Now()
			change()
			mounttest.Await(t, "a change is counted", func() bool { return changes.Now() > before })
		}
	}
	end()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("\nwant the context's error\ngot  %v", err)
	}
	if n := changes.Now(); n != 0 {
		t.Errorf("when nobody counts any more\nwant 0\ngot  %d", n)
	}
}
