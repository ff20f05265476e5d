package storage

import (
	"bytes"
	"io/fs"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// poke writes a few bytes at an offset of an image.
func poke(at int64, b ...byte) func(*testing.T, string) {
	return func(t *testing.T, image string) {
		t.Helper()
		file, err := os.OpenFile(image, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		if _, err := file.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
	}
}

// run runs a program that changes an image. The image's path is its last argument.
func run(name string, args ...string) func(*testing.T, string) {
	return func(t *testing.T, image string) { t.Helper(); mounttest.Run(t, name, append(args, image)...) }
}

// db writes a field of an xfs's superblock and updates the checksum.
func db(field string) func(*testing.T, string) {
	return run("xfs_db", "-x", "-c", "sb 0", "-c", "write -d "+field)
}

// second makes a btrfs of an image and of another one, which no disk has.
func second(t *testing.T, image string) {
	t.Helper()
	mounttest.Run(t, "mkfs.btrfs", "-q", "-f", image, mounttest.Image(t, "ext4"))
}

func cut(bytes int64) func(*testing.T, string) {
	return func(t *testing.T, image string) {
		t.Helper()
		if err := os.Truncate(image, bytes); err != nil {
			t.Fatal(err)
		}
	}
}

// image makes an image with a filesystem, or without one if fstype is "", and changes it.
func image(t *testing.T, fstype string, change func(*testing.T, string), options ...string) (path string) {
	t.Helper()
	if fstype != "" {
		path = mounttest.Image(t, fstype, options...)
	} else {
		path = t.TempDir() + "/blank.img"
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		cut(16<<20)(t, path)
	}
	if change != nil {
		change(t, path)
	}
	return path
}

// Each disk is refused, as it is or after a change, with a certain message. The kernel's own part
// of the message is not checked.
func TestRefusedMountNamesTheContentsOfTheDisk(t *testing.T) {
	const wrong, broken = errkind.InvalidArgument, errkind.FailedPrecondition
	plain := []string{"-O", "^metadata_csum"}
	for name, c := range map[string]struct {
		holds   string
		change  func(*testing.T, string)
		options []string
		as      string
		kind    errkind.Kind
		says    string
	}{
		"zeroes":               {"", nil, nil, "ext4", wrong, "the disk holds nothing known: its first 69632 bytes are zero"},
		"something":            {"", poke(0, bytes.Repeat([]byte("text"), 1<<10)...), nil, "xfs", wrong, "the disk holds nothing known"},
		"btrfs":                {"btrfs", nil, nil, "ext4", wrong, "the disk holds btrfs"},
		"swap":                 {"", run("mkswap"), nil, "ext4", wrong, "the disk holds swap space"},
		"LUKS":                 {"", poke(0, []byte("LUKS\xba\xbe\x00\x02")...), nil, "xfs", wrong, "the disk holds LUKS"},
		"LVM":                  {"", poke(512, []byte("LABELONE")...), nil, "ext4", wrong, "the disk holds an LVM physical volume"},
		"GPT":                  {"", poke(512, []byte("EFI PART")...), nil, "ext4", wrong, "the disk holds a partition table (GPT)"},
		"MBR":                  {"", poke(510, 0x55, 0xaa), nil, "xfs", wrong, "(MBR)"},
		"ext4's journal":       {"ext4", nil, []string{"-O", "journal_dev"}, "ext4", wrong, "the external journal of an ext4"},
		"xfs as ext4":          {"xfs", nil, nil, "ext4", wrong, "the disk holds xfs"},
		"ext4 as ext3":         {"ext4", nil, nil, "ext3", wrong, "the disk holds ext4"},
		"ext3, an option":      {"ext3", nil, nil, "ext3", wrong, "the guest's kernel says: ext3: Unknown parameter 'speed'"},
		"ext3 as ext4":         {"ext3", nil, nil, "ext4", wrong, "the guest's kernel says: ext4: Unknown parameter 'speed'"},
		"btrfs, an option":     {"btrfs", nil, nil, "btrfs", wrong, "the guest's kernel says: "},
		"btrfs as xfs":         {"btrfs", nil, nil, "xfs", wrong, "the disk holds btrfs"},
		"btrfs, no sense":      {"btrfs", poke(64<<10+0x90, 0, 0, 0, 0), nil, "ext4", wrong, "the disk holds a btrfs with an invalid superblock"},
		"btrfs, cut off":       {"btrfs", cut(200 << 20), nil, "btrfs", broken, "ends at 335544320 bytes, but its disk has only 209715200"},
		"btrfs, two devices":   {"btrfs", second, nil, "btrfs", broken, "it is a btrfs with 2 devices"},
		"tiny":                 {"", cut(1536), nil, "ext4", broken, "only 1536 bytes"},
		"ext4, cut off":        {"ext4", cut(200 << 20), nil, "ext4", broken, "ends at 335544320 bytes, but its disk has only 209715200"},
		"xfs, cut off":         {"xfs", cut(200 << 20), nil, "xfs", broken, "ends at 335544320 bytes, but its disk has only 209715200"},
		"ext4, unknown":        {"ext4", poke(1024+0x63, 0x40), plain, "ext4", broken, "kernel says: EXT4-fs ("},
		"ext4, no inodes":      {"ext4", poke(1024+0x28, 0, 0, 0, 0), plain, "ext4", broken, "kernel says: EXT4-fs ("},
		"ext4, its blocks":     {"ext4", poke(1024+0x18, 60), plain, "ext4", broken, ": its superblock is invalid: detach the disk and run on the host: e2fsck DISK"},
		"xfs, no sense":        {"ext4", poke(1024+0x18, 60), plain, "xfs", wrong, "the disk holds an ext4 with an invalid superblock: check that it is formatted with xfs"},
		"xfs, unknown":         {"xfs", db("features_incompat 0x80000003"), nil, "xfs", broken, "kernel says: XFS ("},
		"xfs, to be repaired":  {"xfs", db("features_incompat 0x1b"), nil, "xfs", broken, "(needsrepair): detach the disk and run on the host: xfs_repair"},
		"xfs, half made":       {"xfs", db("inprogress 1"), nil, "xfs", broken, "(inprogress): detach the disk and run on the host: xfs_repair"},
		"xfs, its checksum":    {"xfs", poke(110, 0x55), nil, "xfs", broken, "the checksum does not match: detach the disk and run on the host: xfs_repair"},
		"an option, and sound": {"xfs", nil, nil, "xfs", wrong, "the guest's kernel says: xfs: Unknown parameter 'speed'"},
		"another, of an ext4":  {"ext4", nil, nil, "ext4", wrong, "the guest's kernel says: ext4: Unknown parameter 'speed'"},
	} {
		t.Run(name, func(t *testing.T) {
			disk := mounttest.Attach(t, image(t, c.holds, c.change, c.options...))
			var options []string
			if strings.Contains(c.says, "'speed'") || name == "btrfs, an option" {
				options = []string{"speed=high"}
			}
			err := hold(t, newTable(), onDisk(disk, c.as, mounttest.Dir(t), options...))
			if err == nil || errkind.Of(err) != c.kind || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "directvol rescue") {
				t.Errorf("\nwant kind %d, and %q\ngot  kind %d, %v", c.kind, c.says, errkind.Of(err), err)
			}
		})
	}
}

// A copy of a mounted disk is refused, because xfs does not mount two filesystems with the same
// UUID.
func TestCopyOfAMountedXFSIsRefusedByItsUUID(t *testing.T) {
	path := mounttest.Image(t, "xfs")
	twin := t.TempDir() + "/twin.img"
	mounttest.Run(t, "cp", "--sparse=always", path, twin)
	mounttest.Mount(t, mounttest.Attach(t, path), mounttest.Dir(t), "xfs", 0, "")
	err := hold(t, newTable(), onDisk(mounttest.Attach(t, twin), "xfs", mounttest.Dir(t)))
	if errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "duplicate UUID") {
		t.Errorf("want a FailedPrecondition in the kernel's words\ngot  %v", err)
	}
}

// Not every kernel returns these errors for the disks that cause them.
func TestMissingKernelFeatureIsNotAnInternalError(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOSYS, unix.ESRCH, unix.EOPNOTSUPP, unix.EFBIG, unix.ENXIO, unix.ENOENT} {
		if got := mountKind(&fs.PathError{Op: "fsconfig", Path: "/dev/vda", Err: errno}); got != errkind.FailedPrecondition {
			t.Errorf("%v\nwant kind %d\ngot  %d", errno, errkind.FailedPrecondition, got)
		}
	}
	xfs := request{fstype: "xfs"}
	if kind, why := wayOut(xfs, origin{path: "/dev/none"}, unix.ENOENT, &health.KernelLog{}); kind != errkind.FailedPrecondition || !strings.Contains(why, "gone") {
		t.Errorf("a disk that has left\nwant an error that says so\ngot  kind %d, %s", kind, why)
	}
}
