package ways

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/directvol/directvol/rootfs"
	"github.com/directvol/directvol/rootfs/kernel"
	"github.com/directvol/directvol/tests/vm"
)

const (
	kiB = 1 << 10
	miB = 1 << 20
)

const (
	// callLimit ends what hangs, as a base for vm.Limit.
	callLimit = 10 * time.Second
	// jobLimit is the same for what takes many calls, or bytes.
	jobLimit = 2 * time.Minute
)

var (
	build  vm.Build
	shared *vm.Guest // nil where none is running
	images string    // a folder for the image that all tests boot
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	var err error
	if build, err = vm.FindBuild(); err == nil {
		images, err = os.MkdirTemp("", "directvol-ways-")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(images)
	code = m.Run()
	if shared == nil {
		return code
	}
	if err := powerOff(shared); err != nil {
		fmt.Fprintln(os.Stderr, "FAIL: the shared guest did not end in order:", err)
		shared.Explain(os.Stderr)
		code = max(code, 1)
	}
	return code
}

func powerOff(g *vm.Guest) error {
	ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
	defer cancel()
	err := g.Stop(ctx)
	g.Kill()
	return errors.Join(err, g.Close())
}

// guest returns the guest that the tests share, and boots it where there is
// none. Its kernel can do vsock inside itself.
func guest(t *testing.T) *vm.Guest {
	t.Helper()
	if shared == nil {
		var err error
		shared, err = vm.Boot(t.Context(), vm.Options{Image: loopbackImage(t)})
		must(t, err)
	}
	g := shared
	t.Cleanup(func() {
		if t.Failed() {
			g.Explain(t.Output())
		}
	})
	return g
}

// lastGuest returns the shared guest to a test that leaves nothing of it.
func lastGuest(t *testing.T) *vm.Guest {
	g := guest(t)
	shared = nil
	t.Cleanup(func() {
		g.Kill()
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// loopbackImage makes the usual test image, with vsock_loopback and more programs.
func loopbackImage(t *testing.T, more ...rootfs.Program) string {
	t.Helper()
	image := filepath.Join(images, "guest.cpio")
	_, err := rootfs.Build(t.Context(), rootfs.Image{
		Kernel:  kernel.Source{Cache: filepath.Join(build.Dir, "cache")},
		Modules: []string{"vsock_loopback"},
		Programs: append([]rootfs.Program{
			{Guest: "/init", Host: filepath.Join(build.Dir, "directvol-agent")},
			{Guest: "/test-guest", Host: filepath.Join(build.Dir, "test-guest")},
		}, more...),
		Out: image, KernelOut: filepath.Join(images, "vmlinuz"),
	})
	must(t, err)
	return image
}

// limited returns the context of one call or a few.
func limited(t *testing.T) context.Context { return within(t, callLimit) }

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
