package volumes

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// resize calls only the agent: the disk has the size that the test gave it.
func resize(t *testing.T, g *vm.Guest, v *vm.Volume, size uint64) error {
	t.Helper()
	return g.Agent().ResizeVolume(limited(t), v.GuestPath, size)
}

// extent returns a filesystem's size according to the guest's kernel.
func extent(t *testing.T, g *vm.Guest, v *vm.Volume) (s struct{ blocks, inodes, block uint64 }) {
	t.Helper()
	fs := statFS(t, g, v.GuestPath)
	s.blocks, s.inodes, s.block = fs.Blocks, fs.Files, uint64(fs.BlockSize)
	return s
}

func TestResizeToZeroGoesToTheDevicesEnd(t *testing.T) {
	everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		goal := disks[fstype] + 64*miB
		must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
		// The new capacity is announced by an event, and size 0 does not wait for one.
		must(t, resize(t, g, v, goal))
		full := extent(t, g, v)
		must(t, resize(t, g, v, 0))
		if got := extent(t, g, v); got != full {
			t.Errorf("a filesystem at its device's end\nwant %+v\ngot  %+v", full, got)
		}
	})
}

// A filesystem that ends before its device's end grows to the requested size, an xfs to the end of
// the allocation group there, and with size 0 to the end of the device.
func TestResizeGoesAsFarAsItIsAsked(t *testing.T) {
	everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		before := extent(t, g, v)
		must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), disks[fstype]+96*miB))
		must(t, resize(t, g, v, disks[fstype]+48*miB))
		half := extent(t, g, v)
		must(t, resize(t, g, v, 0))
		whole := extent(t, g, v)
		// Without the part of the new space that a filesystem keeps for itself.
		to := map[string]uint64{"btrfs": 48 * miB, "ext3": 48 * miB, "ext4": 48 * miB, "xfs": 76 * miB}[fstype]
		if got := (half.blocks - before.blocks) * half.block; got < to-8*miB || got > to {
			t.Errorf("by 48 MiB\nwant %d bytes more, or a little less\ngot  %d", to, got)
		}
		if got := (whole.blocks - before.blocks) * whole.block; got < 80*miB || got > 96*miB {
			t.Errorf("by 0 to the end: %d bytes more", got)
		}
	})
}

// When ResizeVolume returns, the superblock is on the disk: a mount after a power cut relies on it.
// To make the kernel write the superblock, the agent sets the label again to the same value.
func TestGrownXFSIsOnItsDiskWithTheAnswer(t *testing.T) {
	g := guest(t)
	v := newVolume(t, g, "xfs")
	const label = "twelve-bytes" // the maximum length
	if out, err := exec.CommandContext(limited(t), "xfs_admin", "-L", label, v.Path).CombinedOutput(); err != nil {
		t.Fatalf("xfs_admin: %v\n%s", err, out)
	}
	must(t, v.Mount(limited(t)))
	image, err := os.Open(v.Path)
	must(t, err)
	defer image.Close()
	for goal := disks["xfs"] + 64*miB; goal < 2*disks["xfs"]; goal += 64 * miB {
		must(t, v.Resize(limited(t), goal))
		super := make([]byte, 512) // struct xfs_dsb, fs/xfs/libxfs/xfs_format.h
		_, err := image.ReadAt(super, 0)
		must(t, err)
		if got := binary.BigEndian.Uint64(super[8:]) * uint64(binary.BigEndian.Uint32(super[4:])); got != goal {
			t.Errorf("the superblock on the disk\nwant %d bytes\ngot  %d", goal, got)
		}
		if got := string(super[108:120]); got != label {
			t.Errorf("its label\nwant %q\ngot  %q", label, got)
		}
	}
}

func TestResizeToTheSameSizeSucceedsAnyNumberOfTimes(t *testing.T) {
	everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		before := extent(t, g, v)
		for name, size := range map[string]uint64{
			"equal": disks[fstype], "to the end": 0, "less than a block below": disks[fstype] - 1,
			"a block below": disks[fstype] - before.block, "less than a block above": disks[fstype] + 1,
		} {
			for range 3 {
				if err := resize(t, g, v, size); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		}
		if got := extent(t, g, v); got != before {
			t.Errorf("it changed\nwant %+v\ngot  %+v", before, got)
		}
	})
}

// Space that the kernel leaves unused at the end of a device counts as reached.
func TestResizeWithAnUnusableRestSucceedsAnyNumberOfTimes(t *testing.T) {
	const ext4Group, xfsGroup = 8 * miB, 76 * miB
	for _, c := range []struct {
		name, fstype string
		size         uint64 // size of the device
		end          uint64 // end of the filesystem on the device
	}{
		{"ext4, less than a block", "ext4", 96*miB + 512, 96 * miB},
		{"ext4, a last group without room for its metadata", "ext4", kiB + 11*ext4Group + 5*kiB, kiB + 11*ext4Group},
		{"xfs, less than a block", "xfs", 380*miB + 512, 380 * miB},
		{"xfs, a block less a sector", "xfs", 380*miB + 4096 - 512, 380 * miB},
		{"xfs, a last group of 63 blocks", "xfs", 5*xfsGroup + 63*4096, 5 * xfsGroup},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := guest(t)
			v := mounted(t, g, c.fstype)
			before := extent(t, g, v)
			must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), c.size))
			must(t, resize(t, g, v, c.size))
			grown := extent(t, g, v)
			for _, again := range []uint64{c.size, 0, c.size} {
				must(t, resize(t, g, v, again))
			}
			if got := extent(t, g, v); got != grown {
				t.Errorf("asked again, it changed\nwant %+v\ngot  %+v", grown, got)
			}
			if got := end(t, g, v, before.blocks, grown.blocks); got != c.end {
				t.Errorf("the filesystem's end\nwant %d\ngot  %d", c.end, got)
			}
		})
	}
}

// The kernel makes a short last group or leaves the space out, depending on the place of ext4's
// metadata. Neither is a failure.
func TestResizeSucceedsWithEveryRest(t *testing.T) {
	const group = 8 * miB
	g := guest(t)
	v := mounted(t, g, "ext4")
	groups := disks["ext4"] / group
	for _, rest := range []uint64{1, 2, 200, 400, 512, 513, 514, 515, 516, 517, 600, 770, 771, 772, 773, 774, 775, 900, 8191} {
		groups++
		size := kiB + groups*group + rest*kiB
		must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), size))
		for range 2 {
			if err := resize(t, g, v, size); err != nil {
				t.Errorf("a rest of %d blocks: %v", rest, err)
			}
		}
		if got := end(t, g, v, 0, 0); got != size && got != size-rest*kiB {
			t.Errorf("a rest of %d blocks: the filesystem's end\nwant %d, or %d without it\ngot  %d", rest, size, size-rest*kiB, got)
		}
	}
}

// end returns the end of a filesystem on its device, in bytes: from the superblock for ext4
// (fs/ext4/ext4.h); from the change in size for xfs, which keeps nothing of the new space for
// itself.
func end(t *testing.T, g *vm.Guest, v *vm.Volume, before, after uint64) uint64 {
	t.Helper()
	if v.FSType == "xfs" {
		return disks["xfs"] + (after-before)*4096
	}
	super, err := g.Remote.ReadAt(limited(t), sizes(t, v).Device, 1024, 1024)
	must(t, err)
	return uint64(binary.LittleEndian.Uint32(super[4:])) << (10 + binary.LittleEndian.Uint32(super[0x18:]))
}

func TestResizeNeverShrinks(t *testing.T) {
	everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		before := extent(t, g, v)
		// A smaller size that leads to the present end of an xfs is success.
		group := map[string]uint64{"xfs": 76 * miB}[fstype] // none in others
		for _, size := range []uint64{1, 512, disks[fstype] / 2, disks[fstype] - group - before.block - 1} {
			err := resize(t, g, v, size)
			refused(t, err, codes.OutOfRange, strconv.FormatUint(size, 10), strconv.FormatUint(disks[fstype], 10))
		}
		if got := extent(t, g, v); got != before {
			t.Errorf("it changed\nwant %+v\ngot  %+v", before, got)
		}
	})
}

// The agent itself gives up (agent.directvol.resize_wait), not its caller, and has changed nothing.
func TestDeviceThatStaysSmallerIsReportedWithBothSizes(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		before := extent(t, g, v)
		err := resize(t, g, v, disks[fstype]+before.block)
		refused(t, err, codes.DeadlineExceeded, strconv.FormatUint(disks[fstype]+before.block, 10), strconv.FormatUint(disks[fstype], 10))
		for _, size := range []uint64{1 << 63, math.MaxUint64} {
			err := resize(t, g, v, size)
			if fstype == "ext4" { // it can never have so many inodes, which the agent says at once
				refused(t, err, codes.FailedPrecondition, "inodes")
				continue
			}
			refused(t, err, codes.DeadlineExceeded, strconv.FormatUint(size, 10), strconv.FormatUint(disks[fstype], 10))
		}
		if got := extent(t, g, v); got != before {
			t.Errorf("it changed\nwant %+v\ngot  %+v", before, got)
		}
	})
}

// The agent reserves 200 ms of its caller's deadline for the answer's way. A stalling machine may
// use them up, so one success in several attempts is enough: without the reserve no attempt would
// succeed.
func TestAnswerComesBeforeTheCallersDeadline(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "ext4")
	var err error
	for range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		err = g.Agent().ResizeVolume(ctx, v.GuestPath, 128*miB)
		cancel()
		if status.Code(err) == codes.DeadlineExceeded && strings.Contains(err.Error(), strconv.Itoa(64*miB)) {
			return
		}
	}
	t.Errorf("\nwant the agent's words\ngot  %v", err)
}

func TestResizesAtOnceAllSucceed(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		goal := disks[fstype] + 64*miB
		must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
		ctx := limited(t)
		answers := make(chan error)
		calls := []uint64{goal, goal, goal - 16*miB, goal - 32*miB}
		for _, size := range calls {
			go func() { answers <- g.Agent().ResizeVolume(ctx, v.GuestPath, size) }()
		}
		for range calls {
			// A late call may find a filesystem larger than it asks for.
			if err := <-answers; err != nil && status.Code(err) != codes.OutOfRange {
				t.Error(err)
			}
		}
		grown := extent(t, g, v)
		must(t, resize(t, g, v, goal))
		if got := extent(t, g, v); got != grown {
			t.Errorf("it was not grown to the end\nwant %+v\ngot  %+v", got, grown)
		}
	})
}

// Another grower in the guest, which always asks for the end of the device, never turns a request
// of ours into a shrink.
func TestTwoGrowersNeverShrinkAnXFS(t *testing.T) { growsBesideAnother(t, 60) }

func growsBesideAnother(t *testing.T, rounds int) {
	t.Helper()
	g := guest(t)
	v := mounted(t, g, "xfs")
	size, start := disks["xfs"], extent(t, g, v)
	reached, ours, beyond, others := size, 0, 0, 0
	for range rounds {
		size += 12 * miB // so that most ends lie inside a group
		must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), size))
		other := make(chan error)
		go func() { other <- growElsewhere(t, g, v, size) }()
		// The size is less than the device's, and the other grower may exceed it.
		err := resize(t, g, v, size-8*miB)
		switch status.Code(err) {
		case codes.OK:
			ours++
		case codes.OutOfRange:
			beyond++
		case codes.DeadlineExceeded:
		default:
			t.Error(err)
		}
		theirs := <-other
		if theirs == nil {
			reached = size
			others++
		} else if !errors.Is(theirs, syscall.EAGAIN) { // our growth was in progress
			t.Error(theirs)
		}
		if got := end(t, g, v, start.blocks, extent(t, g, v).blocks); got < reached-63*4096 {
			t.Fatalf("want at least the %d bytes of a successful growth\ngot  %d", reached, got)
		}
	}
	t.Logf("of %d rounds, our request succeeded in %d and was exceeded in %d, the other's succeeded in %d", rounds, ours, beyond, others)
	if ours == 0 || others == 0 {
		t.Error("one of the two has never grown it, so nothing is shown")
	}
}

// growElsewhere grows the filesystem without the agent's knowledge, as soon as the guest's device
// has the size.
func growElsewhere(t *testing.T, g *vm.Guest, v *vm.Volume, size uint64) error {
	for ctx := limited(t); ; {
		_, err := g.Remote.Grow(ctx, remote.Grow{Path: v.GuestPath, FSType: v.FSType, Bytes: size})
		if !errors.Is(err, syscall.EIO) { // EIO: beyond the end of the device
			return err
		}
	}
}

// After a growth, the page cache of the block device may be older than the filesystem. A second
// container's mount must not be refused for that.
func TestSecondMountOfAGrownVolumeComesAndGoes(t *testing.T) {
	everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v, first := attached(t, g, fstype)
		second := *first
		second.MountPoint += "-second"
		must(t, container(t, g, "first-"+v.ID, first))
		for round := range uint64(3) {
			must(t, container(t, g, "second-"+v.ID, &second))
			must(t, g.Agent().RemoveContainer(limited(t), "second-"+v.ID))
			size := disks[fstype] + (round+1)*48*miB
			must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), size))
			must(t, g.Agent().ResizeVolume(limited(t), first.MountPoint, size))
		}
		must(t, container(t, g, "second-"+v.ID, &second))
		must(t, g.Agent().RemoveContainer(limited(t), "first-"+v.ID))
		must(t, g.Agent().ResizeVolume(limited(t), second.MountPoint, 0))
		must(t, g.Agent().RemoveContainer(limited(t), "second-"+v.ID))
	})
}

// A growth that the kernel would refuse only after the disk has grown is refused before: the disk
// keeps its size.
func TestDiskDoesNotGrowForAFilesystemThatCannot(t *testing.T) {
	g := guest(t)
	for name, c := range map[string]struct {
		fstype  string
		options []string
		says    string
	}{
		"sparse_super2": {"ext4", []string{"-O", "sparse_super2,^resize_inode"}, "sparse_super2"},
		"no 64bit":      {"ext4", []string{"-b", "1024", "-O", "^64bit"}, "64bit"},
		"ext3":          {"ext3", []string{"-b", "1024"}, "tune2fs -O extents"},
	} {
		t.Run(name, func(t *testing.T) {
			v := newVolume(t, g, c.fstype)
			out, err := exec.Command("mkfs."+c.fstype, slices.Concat([]string{"-q", "-F"}, c.options, []string{v.Path})...).CombinedOutput()
			if err != nil {
				t.Fatalf("mkfs.%s: %v\n%s", c.fstype, err, out)
			}
			must(t, v.Mount(limited(t)))
			before := extent(t, g, v)
			refused(t, v.Resize(limited(t), 5<<40), codes.FailedPrecondition, c.says, "its disk is unchanged")
			if got := sizes(t, v).DeviceBytes; got != disks["ext4"] {
				t.Errorf("the disk\nwant %d bytes\ngot  %d", disks["ext4"], got)
			}
			if got := extent(t, g, v); got != before {
				t.Errorf("the filesystem\nwant %+v\ngot  %+v", before, got)
			}
		})
	}
}

// Only the new part of the disk fails: the growth does, and the volume goes on. When the disk is
// repaired the same call succeeds, without a new mount.
func TestGrowthIntoAPartThatFailsSucceedsWhenItIsRepaired(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "xfs")
	ctx := within(t, jobLimit)
	writer, err := v.StartWriter(ctx, 0)
	must(t, err)
	must(t, writer.Await(ctx, miB))
	must(t, v.BreakWritesAt(limited(t), disks["xfs"])) // the header of the first new group
	healsAtEnd(t, v)
	refused(t, v.Resize(limited(t), 2*disks["xfs"]), codes.FailedPrecondition, "if it still fails")
	must(t, writer.Await(ctx, writer.Ledger().Bytes()+miB))
	must(t, v.Heal(limited(t)))
	must(t, v.Resize(limited(t), 2*disks["xfs"]))
	must(t, writer.Stop(ctx))
	freshlyVerified(t, v, writer.Ledger().Bytes())
}

// The superblock of a group cannot be written while an xfs grows. The kernel reports that only to
// the call that grows, and no later growth of the same size writes the superblock again: OK must
// wait until it is whole, or xfs_repair would find the volume inconsistent.
func TestGrowthIsNotDoneWhileASuperblockIsNotWritten(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "xfs")
	must(t, v.BreakWritesAt(limited(t), disks["xfs"]/4)) // the second of four groups
	healsAtEnd(t, v)
	for range 2 {
		refused(t, v.Resize(limited(t), 2*disks["xfs"]), codes.FailedPrecondition, "if it still fails")
	}
	must(t, v.Heal(limited(t)))
	must(t, v.Resize(limited(t), 2*disks["xfs"])) // the end of the test checks the filesystem
}

// The kernel refuses to grow an ext4 with a damaged resize inode with EINVAL, and only its log has
// the reason.
func TestGrowthOfADamagedExt4NamesItsRepair(t *testing.T) {
	g := guest(t)
	v := newVolume(t, g, "ext4")
	said := onHost(t, "debugfs", "-R", "stat <7>", v.Path)
	_, block, found := strings.Cut(said, "(DIND):")
	block, _, _ = strings.Cut(block, ",")
	if !found {
		t.Fatalf("no double indirect block:\n%s", said)
	}
	onHost(t, "debugfs", "-w", "-R", "zap_block -p 0 "+block, v.Path)
	must(t, v.Mount(limited(t)))
	refused(t, v.Resize(limited(t), 2*disks["ext4"]), codes.FailedPrecondition, "e2fsck", "reserved")
	must(t, v.Detach(limited(t)))
	out, err := exec.CommandContext(limited(t), "e2fsck", "-fy", v.Path).CombinedOutput()
	if exit := new(exec.ExitError); err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) { // 1: repaired
		t.Fatalf("e2fsck -fy: %v\n%s", err, out)
	}
	must(t, v.Mount(limited(t)))
	must(t, v.Resize(limited(t), 2*disks["ext4"]))
}

// onHost runs a program on the host, and returns its output.
func onHost(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := exec.CommandContext(limited(t), argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", argv, err, out)
	}
	return string(out)
}

func TestRefusedGrowthNamesItsReason(t *testing.T) {
	g := guest(t)
	t.Run("no block device", func(t *testing.T) {
		path := tmpfs(t, g, "/run/test/nodevice")
		refused(t, g.Agent().ResizeVolume(limited(t), path, 64*miB), codes.FailedPrecondition, path, "no block device")
	})
	t.Run("read-only", func(t *testing.T) {
		everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
			v := mounted(t, g, fstype, "ro")
			must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), 2*disks[fstype]))
			refused(t, resize(t, g, v, 2*disks[fstype]), codes.FailedPrecondition, v.GuestPath, "read-only")
		})
	})
	t.Run("made read-only later", func(t *testing.T) {
		v := mounted(t, g, "ext4")
		remountReadOnly(t, g, v)
		refused(t, resize(t, g, v, 0), codes.FailedPrecondition, v.GuestPath, "read-only")
	})
	for name, path := range map[string]string{"no mount point": "/etc", "relative": "run", "empty": ""} {
		t.Run(name, func(t *testing.T) {
			refused(t, g.Agent().ResizeVolume(limited(t), path, 0), codes.InvalidArgument)
		})
	}
	t.Run("unknown", func(t *testing.T) {
		refused(t, g.Agent().ResizeVolume(limited(t), "/run/test/nothing", 0), codes.NotFound, "/run/test/nothing")
	})
}
