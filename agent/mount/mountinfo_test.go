package mount

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
)

// kernelText is a guest's mountinfo with two mounts at /run/v.
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

// Linux lists mounts in order of creation since 6.18, and move_mount(2) may put an older mount on
// top of a newer one.
func TestTopmostMountIsNotCoveredByAnother(t *testing.T) {
	const root = "22 1 0:2 / / rw - rootfs none rw\n"
	for name, c := range map[string]struct {
		text string
		want []int // the path leads to the last one
	}{
		"as it was mounted":                  {"40 22 8:0 / /v rw - xfs a rw\n41 40 8:1 / /v rw - xfs b rw\n", []int{40, 41}},
		"an older one on top":                {"40 41 8:0 / /v rw - xfs a rw\n41 22 8:1 / /v rw - xfs b rw\n", []int{41, 40}},
		"the oldest in the middle":           {"40 42 8:0 / /v rw - xfs a rw\n41 40 8:1 / /v rw - xfs b rw\n42 22 8:2 / /v rw - xfs c rw\n", []int{42, 40, 41}},
		"one below a folder that is covered": {"39 22 8:9 / /v rw - xfs x rw\n40 39 8:0 / /v/a rw - xfs a rw\n41 39 8:1 / /v rw - xfs b rw\n", []int{40}},
		"another in what covers the folder":  {"38 41 8:8 / /v/a rw - xfs y rw\n39 22 8:9 / /v rw - xfs x rw\n40 39 8:0 / /v/a rw - xfs a rw\n41 39 8:1 / /v rw - xfs b rw\n", []int{40, 38}},
		"below a folder that was covered":    {"38 22 8:8 / /v/a rw - xfs y rw\n39 22 8:9 / /v rw - xfs x rw\n40 39 8:0 / /v/a rw - xfs a rw\n", []int{38, 40}},
		"a circle, which no kernel has":      {"40 41 8:0 / /v rw - xfs a rw\n41 40 8:1 / /v rw - xfs b rw\n", []int{40, 41}},
	} {
		path := "/v"
		if strings.Contains(c.text, "/v/a") {
			path = "/v/a"
		}
		mounts, err := Read(strings.NewReader(root + c.text))
		if got := idsOf(ListOf(mounts).Stack(path)); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s, at %s\nwant %v\ngot  %v, error %v", name, path, c.want, got, err)
		}
	}
}

func idsOf(mounts []*mountinfo.Info) (ids []int) {
	for _, m := range mounts {
		ids = append(ids, m.ID)
	}
	return ids
}

// escape matches an escape sequence of the kernel, a byte in octal (mangle_path in fs/seq_file.c).
var escape = regexp.MustCompile(`\\[01][0-7][0-7]`)

func unescaped(field string) string {
	return escape.ReplaceAllStringFunc(field, func(s string) string {
		b, _ := strconv.ParseUint(s[1:], 8, 8)
		return string([]byte{byte(b)})
	})
}

// FuzzMountinfo compares the mounts found at a path in any text with the fifth fields of the text's
// lines.
func FuzzMountinfo(f *testing.F) {
	for _, path := range []string{"/run/v", "/run/v two", "/run", ""} {
		f.Add(kernelText, path)
	}
	f.Add("1 2 3:4 / /a rw - t s o\r\n1 2 3:4 / /a rw - t s o", "/a")
	f.Add("x 2 : / / rw - - - -", "/")
	f.Fuzz(func(t *testing.T, text, path string) {
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
		all, err := Read(strings.NewReader(text))
		got := idsOf(ListOf(all).Stack(path))
		slices.Sort(got)
		if slices.Sort(want); err != nil || !slices.Equal(got, want) {
			t.Errorf("mounts at %q in %q, by their parents\nwant %v\ngot  %v, error %v", path, text, want, got, err)
		}
	})
}

// FuzzMountPoint checks that a mount with any names is found in the line that the kernel would
// write for it (show_mountinfo in fs/proc_namespace.c).
func FuzzMountPoint(f *testing.F) {
	f.Add("/run/v", "/dev/vda", "ext4", uint16(40), uint16(254), uint32(0))
	f.Add("/run/a b\t\n\\040#", "kata#Shared x", "fuse.a b", uint16(0), uint16(0), uint32(1<<20-1))
	f.Add("/\r\x01\xff", "", "-", uint16(1), uint16(4095), uint32(1))
	f.Fuzz(func(t *testing.T, path, source, fstype string, id, major uint16, minor uint32) {
		if len(path)+len(source)+len(fstype) > 8<<10 || strings.ContainsRune(path+source+fstype, 0) {
			return // impossible in a kernel
		}
		line := fmt.Sprintf("%d 22 %d:%d / %s rw shared:1 - %s %s rw\n", id, major, minor, mangled(path, " \t\n\\"), mangled(fstype, " \t\n\\#"), mangled(source, " \t\n\\#"))
		mounts, err := mountinfo.GetMountsFromReader(strings.NewReader(kernelText+line), stackAt(path))
		if err != nil || len(mounts) == 0 {
			t.Fatalf("%q\nwant it found\ngot  %v, error %v", line, mounts, err)
		}
		got := mounts[len(mounts)-1]
		want := mountinfo.Info{ID: int(id), Parent: 22, Major: int(major), Minor: int(minor), Root: "/", Mountpoint: path, Options: "rw", Optional: "shared:1", FSType: fstype, Source: source, VFSOptions: "rw"}
		if *got != want {
			t.Errorf("%q\nwant %+v\ngot  %+v", line, want, got)
		}
	})
}

// mangled escapes a text as the kernel does (mangle_path in fs/seq_file.c).
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
