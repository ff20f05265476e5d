package mount

import (
	"strings"
	"testing"
)

func TestPathBehindAServerIsKnown(t *testing.T) {
	mounts, err := Read(strings.NewReader(`20 1 254:0 / / rw - ext4 /dev/vda rw
21 20 0:40 / /run/shared rw - virtiofs kataShared rw
22 21 254:16 / /run/shared/v rw - xfs /dev/vdb rw
23 20 0:41 / /mnt rw - fuse.sshfs host rw
24 20 254:32 / /mount rw - ext4 /dev/vdc rw
`))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/run/shared": "", "/run/shared/v": "/run/shared", "/run/shared/v/x": "/run/shared",
		"/mnt": "", "/mnt/x": "/mnt", "/mount": "", "/mount/x": "", "/": "",
	} {
		if got := ListOf(mounts).Behind(path); got != want {
			t.Errorf("%s\nwant %q\ngot  %q", path, want, got)
		}
	}
	mounts[0].FSType = "virtiofs"
	if got := ListOf(mounts).Behind("/mount"); got != "/" {
		t.Errorf("on a root that is served\nwant %q\ngot  %q", "/", got)
	}
}
