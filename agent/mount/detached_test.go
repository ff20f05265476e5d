package mount_test

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount"
)

// With the mount API of Linux 5.2, a filesystem reports its objection to an option only to the
// process that mounts it: the error contains the message.
func TestDetachedMountThatIsRefusedSaysWhy(t *testing.T) {
	for data, want := range map[string]string{
		"speed=high":       "tmpfs: Unknown parameter 'speed'",
		"size=lots":        "tmpfs: Bad value for 'size'",
		"mode=700,size=-x": "tmpfs: Bad value for 'size'",
	} {
		file, err := mount.Detached("memory", "tmpfs", mount.Options{Data: data})
		if err == nil {
			file.Close()
		}
		if errors.Is(err, unix.EPERM) {
			t.Skipf("it mounts a tmpfs: run it as root, with sudo go test -run '^%s$'", t.Name())
		}
		if !errors.Is(err, unix.EINVAL) || !strings.Contains(mount.Reason(err), want) {
			t.Errorf("%s\nwant EINVAL, and %q\ngot  %v, and %q", data, want, err, mount.Reason(err))
		}
	}
	if reason := mount.Reason(unix.EINVAL); reason != "" {
		t.Errorf("an error without a reason\nwant nothing\ngot  %q", reason)
	}
}
