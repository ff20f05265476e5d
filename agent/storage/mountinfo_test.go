package storage

import (
	"cmp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// A mount over a storage hides the storage, and is what a request for the same mount point finds.
func TestRequestFindsTheTopmostMount(t *testing.T) {
	dir := mounttest.Own(t)
	if top, err := mount.Topmost(dir); top != nil || err != nil {
		t.Fatalf("want nothing mounted\ngot  %v, error %v", top, err)
	}
	for _, source := range []string{"below", "above"} {
		if err := unix.Mount(source, dir, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
		if top, err := mount.Topmost(dir); err != nil || top == nil || top.Source != source {
			t.Errorf("topmost\nwant %s\ngot  %v, error %v", source, top, err)
		}
	}
	r := request{driver: ephemeral, source: "below", fstype: "tmpfs", mountPoint: dir}
	if did, err := mountOrigin(t.Context(), &devices{}, r, origin{path: "below"}); err == nil || did.made || did.found {
		t.Error("a storage that another one hides was taken over")
	}
}

// FuzzOrigin checks that whether two mounts of a mountinfo have the same origin does not depend on
// the order of the question.
func FuzzOrigin(f *testing.F) {
	const disk = "40 22 254:0 / /run/v rw - ext4 /dev/vda rw\n"
	f.Add(disk + "41 22 254:0 /sub /run/w rw - ext4 /dev/root rw\n42 22 254:16 / /run/x rw - xfs /dev/vdb rw\n")
	f.Add(disk + "43 22 0:30 / /run/shm rw - tmpfs /dev/vda rw\n44 22 0:31 / /run/empty rw - tmpfs  rw\n")
	f.Add("45 22 0:40 / /run/s rw - virtiofs kataShared rw\n46 22 0:41 / /run/t rw - virtiofs kataShared rw\n")
	f.Fuzz(func(t *testing.T, text string) {
		mounts, err := mount.Read(strings.NewReader(text))
		if err != nil {
			return
		}
		mounts = mounts[:min(len(mounts), 8)]
		for _, m := range mounts { // as many bits as in the kernel (MINORBITS in include/linux/kdev_t.h)
			m.Major, m.Minor = m.Major&(1<<12-1), m.Minor&(1<<20-1)
		}
		for _, a := range mounts {
			if a.Source == "" {
				continue // no request can name it
			}
			for _, b := range mounts {
				same := request{fstype: a.FSType}.isOf(originOf(a), b)
				if want := a.FSType == b.FSType && b.Root == "/" && (a.Major != 0 && a.Major == b.Major && a.Minor == b.Minor || a.Major == 0 && b.Major == 0 && a.Source == cmp.Or(b.Source, "none")); same != want {
					t.Errorf("%+v\nand %+v\nof the same origin: %v", a, b, same)
				}
			}
		}
	})
}

// originOf returns the origin of a mount.
func originOf(m *mount.Info) origin {
	if m.Major == 0 {
		return origin{path: m.Source}
	}
	return origin{m.Source, mount.Device{Number: unix.Mkdev(uint32(m.Major), uint32(m.Minor))}}
}
