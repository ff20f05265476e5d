package storage

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount"
)

// The kernel answers EINVAL to a mount while no device has its tag. Without a device, a tmpfs with
// a wrong option gets the same answer.
func TestMountWaitsForItsTagForALimitedTime(t *testing.T) {
	r := request{driver: virtioFS, source: "tag", fstype: "tmpfs", options: mount.Options{Data: "size=none"}, mountPoint: filepath.Join(t.TempDir(), "share")}
	began := time.Now()
	_, err := mountTag(t.Context(), &devices{}, r, origin{path: r.source})
	if errors.Is(err, unix.EPERM) {
		t.Skipf("it mounts: run it as root, with sudo go test -run '^%s$'", t.Name())
	}
	if !errors.Is(err, unix.EINVAL) {
		t.Errorf("want EINVAL\ngot  %v", err)
	}
	if took := time.Since(began); took < tagLimit {
		t.Errorf("want the tag awaited for %v\ngot  %v", tagLimit, took)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := mountTag(over, &devices{}, r, origin{path: r.source}); err == nil {
		t.Error("want an error when the caller has gone")
	}
}
