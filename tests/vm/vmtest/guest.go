package vmtest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/rootfs"
	"github.com/directvol/directvol/rootfs/kernel"
	"github.com/directvol/directvol/tests/vm"
)

// Boot boots a guest for one test. The guest is killed at the test's end, if the test has not ended
// it in order before.
func Boot(t *testing.T, o vm.Options) *vm.Guest {
	t.Helper()
	g, err := vm.Boot(t.Context(), o)
	Must(t, err)
	EndsWith(t, g)
	return g
}

// EndsWith kills a guest at the test's end. If the test has failed, it prints the guest's console
// first.
func EndsWith(t *testing.T, g *vm.Guest) {
	t.Cleanup(func() {
		g.Kill()
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	Explain(t, g)
}

// Explain prints a guest's console, and the command that boots the same guest by hand, if the test
// fails.
func Explain(t *testing.T, g *vm.Guest) {
	t.Cleanup(func() {
		if t.Failed() {
			g.Explain(t.Output())
		}
	})
}

// PowerOff ends a guest in order, and removes its files on the host. It also tests how every guest
// ends: Stop accepts only a SHUTDOWN by the guest and QEMU's exit status 0.
func PowerOff(g *vm.Guest) error {
	ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(CallLimit))
	defer cancel()
	err := g.Stop(ctx)
	g.Kill()
	return errors.Join(err, g.Close())
}

// Shared is a guest for all tests of a package. The first test that needs the guest boots it.
type Shared struct {
	// Options returns the differences of the guest from the ordinary one; nil means none.
	Options func(*testing.T) vm.Options
	// End ends the guest after the last test; nil means PowerOff.
	End func(*vm.Guest) error

	guest *vm.Guest // nil if none is running
}

// Main runs a package's tests, for its TestMain. It does not return. The host's trials of a store
// are programs of their own, at each attach and detach: with the race detector each would sleep for
// a second before it exits (GORACE's atexit_sleep_ms).
func (s *Shared) Main(m *testing.M) {
	if _, set := os.LookupEnv("GORACE"); !set {
		os.Setenv("GORACE", "atexit_sleep_ms=0")
	}
	if _, err := vm.FindBuild(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if s.guest != nil {
		end := s.End
		if end == nil {
			end = PowerOff
		}
		if err := end(s.guest); err != nil {
			fmt.Fprintln(os.Stderr, "FAIL: the shared guest did not end in order:", err)
			s.guest.Explain(os.Stderr)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// Guest returns the guest. The test must leave the guest as it found it.
func (s *Shared) Guest(t *testing.T) *vm.Guest {
	t.Helper()
	s.boot(t)
	Explain(t, s.guest)
	return s.guest
}

// Last returns the guest to a test that makes it unusable. The next test boots another guest.
func (s *Shared) Last(t *testing.T) *vm.Guest {
	t.Helper()
	s.boot(t)
	g := s.guest
	s.guest = nil
	EndsWith(t, g)
	return g
}

func (s *Shared) boot(t *testing.T) {
	t.Helper()
	if s.guest != nil {
		return
	}
	var o vm.Options
	if s.Options != nil {
		o = s.Options(t)
	}
	var err error
	s.guest, err = vm.Boot(context.Background(), o)
	Must(t, err)
}

// Image makes the usual test image with additional modules and programs, and returns its path. The
// file is removed at the test's end; a guest that was booted from it no longer needs it.
func Image(t *testing.T, modules []string, programs ...rootfs.Program) string {
	t.Helper()
	build, err := vm.FindBuild()
	Must(t, err)
	dir := t.TempDir()
	image := filepath.Join(dir, "guest.cpio")
	_, err = rootfs.Build(t.Context(), rootfs.Image{
		Kernel:  kernel.Source{Cache: filepath.Join(build.Dir, "cache")},
		Modules: modules,
		Programs: append([]rootfs.Program{
			{Guest: "/init", Host: filepath.Join(build.Dir, "directvol-agent")},
			{Guest: "/test-guest", Host: filepath.Join(build.Dir, "test-guest")},
		}, programs...),
		Out: image, KernelOut: filepath.Join(dir, "vmlinuz"),
	})
	Must(t, err)
	return image
}

// Mounts returns the guest's mountinfo.
func Mounts(t *testing.T, g *vm.Guest) string {
	t.Helper()
	text, err := g.Remote.ReadFile(Limited(t), "/proc/self/mountinfo")
	Must(t, err)
	return string(text)
}

// IsMounted reports whether the guest has a mount at a path.
func IsMounted(t *testing.T, g *vm.Guest, path string) bool {
	t.Helper()
	return strings.Contains(Mounts(t, g), " "+path+" ")
}

// Detach detaches a volume from its guest, and checks that its filesystem is intact.
func Detach(t *testing.T, v *vm.Volume) {
	t.Helper()
	Must(t, v.Detach(Limited(t)))
	fsck, err := vm.Check(Limited(t), v.FSType, v.Path)
	Must(t, err)
	Must(t, fsck.Err(v.FSType))
}

// AwaitEnds returns when no process of the guest has one of the ids.
func AwaitEnds(t *testing.T, g *vm.Guest, ids []int) {
	t.Helper()
	ctx := Limited(t)
	again := time.NewTicker(20 * time.Millisecond) // no event tells the host
	defer again.Stop()
	for _, id := range ids {
		for {
			_, err := g.Remote.Stat(ctx, fmt.Sprintf("/proc/%d/exe", id))
			if errors.Is(err, fs.ErrNotExist) {
				break
			}
			Must(t, err)
			<-again.C
		}
	}
}
