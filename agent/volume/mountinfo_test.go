package volume

import (
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/refusal"
)

func TestTopmostMountIsTheVolume(t *testing.T) {
	stack := []*mountinfo.Info{{ID: 1}, {ID: 2}, {ID: 3}}
	for id, want := range map[int]int{unknownMount: 3, 3: 3, 1: 1} {
		if got, err := pick(stack, id); err != nil || got.ID != want {
			t.Errorf("mount %d of a stack of three\nwant %d\ngot  %v, error %v", id, want, got, err)
		}
	}
	if got, err := pick(stack, 4); err == nil {
		t.Errorf("of one that is gone\nwant an error\ngot  %v", got)
	}
}

// kernelText is a guest's mountinfo, with two mounts at /run/v.
const kernelText = `22 1 0:2 / / rw - rootfs none rw
23 22 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:1 - proc proc rw
40 22 254:0 / /run/v rw,relatime shared:2 master:1 - ext4 /dev/vda rw
41 22 254:0 /sub /run/v\040two rw,relatime - ext4 /dev/vda rw
42 40 254:16 / /run/v rw,relatime - xfs /dev/vdb rw,attr2,inode64,logbufs=8,logbsize=32k,noquota
43 22 0:30 / /run/shm rw - tmpfs  rw,size=1024k
`

func TestStackOfMountsIsReadWhole(t *testing.T) {
	mounts, err := mountinfo.GetMountsFromReader(strings.NewReader(kernelText), stackAt("/run/v"))
	if want := []int{40, 42}; err != nil || !slices.Equal(idsOf(mounts), want) {
		t.Errorf("mounts at /run/v\nwant %v\ngot  %v, error %v", want, idsOf(mounts), err)
	}
}

// What hides a volume is what the path leads to, and is the one that counts.
func TestVolumeMountedOverAnotherIsTheOneFound(t *testing.T) {
	ownMounts(t)
	dir := t.TempDir()
	for _, source := range []string{"below", "above"} {
		if err := unix.Mount(source, dir, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	}
	mounts, err := MountsAt(dir)
	if err != nil || len(mounts) != 2 || mounts[1].Source != "above" {
		t.Fatalf("mounts\nwant two, above the last\ngot  %v, error %v", mounts, err)
	}
	v, err := newTable().Lookup(dir)
	if err != nil || v.mountID != mounts[1].ID {
		t.Errorf("want mount %d\ngot  %+v, error %v", mounts[1].ID, v, err)
	}
	if err := unix.Unmount(dir, 0); err != nil {
		t.Fatal(err)
	}
	if v, err = newTable().Lookup(dir); err != nil || v.mountID != mounts[0].ID {
		t.Errorf("with the upper one gone\nwant mount %d\ngot  %+v, error %v", mounts[0].ID, v, err)
	}
	if err := v.Resize(t.Context(), 0, 0); refusal.KindOf(err) != refusal.FailedPrecondition {
		t.Errorf("want a FailedPrecondition\ngot  %v", err)
	}
}

// ownMounts gives the test mounts that nobody else sees, on a thread that ends
// with it.
func ownMounts(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS)
	if err == nil {
		err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	}
	if err != nil {
		t.Skipf("mounts of its own: %v: run it as root, with sudo go test -run '^%s$'", err, t.Name())
	}
}

func idsOf(mounts []*mountinfo.Info) (ids []int) {
	for _, m := range mounts {
		ids = append(ids, m.ID)
	}
	return ids
}

// escape is one of the kernel's, a byte in octal (mangle_path in fs/seq_file.c).
var escape = regexp.MustCompile(`\\[01][0-7][0-7]`)

func unescaped(field string) string {
	return escape.ReplaceAllStringFunc(field, func(s string) string {
		b, _ := strconv.ParseUint(s[1:], 8, 8)
		return string([]byte{byte(b)})
	})
}

// FuzzMountinfo holds what is found at a path in any text against the fifth
// fields of its lines.
func FuzzMountinfo(f *testing.F) {
	for _, path := range []string{"/run/v", "/run/v two", "/run", ""} {
		f.Add(kernelText, path, 40)
	}
	f.Add("1 2 3:4 / /a rw - t s o\r\n1 2 3:4 / /a rw - t s o", "/a", 1)
	f.Add("x 2 : / / rw - - - -", "/", 0)
	f.Fuzz(func(t *testing.T, text, path string, id int) {
		mounts, err := mountinfo.GetMountsFromReader(strings.NewReader(text), stackAt(path))
		if err != nil {
			return
		}
		var want []int
		for line := range strings.Lines(text) {
			if fields := strings.Split(strings.TrimSuffix(line, "\n"), " "); unescaped(fields[4]) == path {
				number, _ := strconv.Atoi(fields[0])
				want = append(want, number)
			}
		}
		if got := idsOf(mounts); !slices.Equal(got, want) {
			t.Errorf("mounts at %q in %q\nwant %v\ngot  %v", path, text, want, got)
		}
		top, err := pick(mounts, unknownMount)
		if (err == nil) != (len(want) > 0) || err == nil && top != mounts[len(mounts)-1] {
			t.Errorf("topmost of %v\ngot %v, error %v", want, top, err)
		}
		one, err := pick(mounts, id)
		if (err == nil) != (slices.Contains(want, id) || id == unknownMount && len(want) > 0) || err == nil && id != unknownMount && one.ID != id {
			t.Errorf("mount %d of %v\ngot %v, error %v", id, want, one, err)
		}
	})
}

// FuzzMountPoint has a mount of any names be found again in the line that the
// kernel would write of it (show_mountinfo in fs/proc_namespace.c).
func FuzzMountPoint(f *testing.F) {
	f.Add("/run/v", "/dev/vda", "ext4", uint16(40), uint16(254), uint32(0))
	f.Add("/run/a b\t\n\\040#", "kata#Shared x", "fuse.a b", uint16(0), uint16(0), uint32(1<<20-1))
	f.Add("/\r\x01\xff", "", "-", uint16(1), uint16(4095), uint32(1))
	f.Fuzz(func(t *testing.T, path, source, fstype string, id, major uint16, minor uint32) {
		if len(path)+len(source)+len(fstype) > 8<<10 || strings.ContainsRune(path+source+fstype, 0) {
			return // neither is there in a kernel
		}
		line := fmt.Sprintf("%d 22 %d:%d / %s rw shared:1 - %s %s rw\n", id, major, minor, mangled(path, " \t\n\\"), mangled(fstype, " \t\n\\#"), mangled(source, " \t\n\\#"))
		mounts, err := mountinfo.GetMountsFromReader(strings.NewReader(kernelText+line), stackAt(path))
		if err != nil || len(mounts) == 0 {
			t.Fatalf("%q\nwant it found\ngot  %v, error %v", line, mounts, err)
		}
		got, err := pick(mounts, int(id))
		want := mountinfo.Info{ID: int(id), Parent: 22, Major: int(major), Minor: int(minor), Root: "/", Mountpoint: path, Options: "rw", Optional: "shared:1", FSType: fstype, Source: source, VFSOptions: "rw"}
		if err != nil || *got != want {
			t.Errorf("%q\nwant %+v\ngot  %+v, error %v", line, want, got, err)
		}
	})
}

// mangled is a text as the kernel escapes it (mangle_path in fs/seq_file.c).
func mangled(text, special string) string {
	var b strings.Builder
	for _, c := range []byte(text) {
		if strings.IndexByte(special, c) >= 0 {
			fmt.Fprintf(&b, `\%03o`, c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}
