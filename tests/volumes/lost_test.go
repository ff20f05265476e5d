package volumes

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/tests/vm"
)

// A disk fails right behind block_resize: it vanishes, or every write fails from then on. A growth
// is a success only if the new size is in the superblock on the disk. Otherwise the answer is an
// error, the volume is inaccessible, and no other volume is affected. After a repair the same call
// reaches the size, and the volume has what was written before.
//
// The kernel (6.1) writes an ext4's superblock with the new size at the latest at the unmount,
// although the journal has stopped before the new group descriptors were in it. e2fsck -p leaves
// such an ext4 to its user; e2fsck -y repairs it without a loss.
func TestDiskThatFailsAtItsGrowthIsNoSuccess(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		beside := mounted(t, g, fstype)
		must(t, beside.Resize(limited(t), 16*disks[fstype])) // room for its writer
		writer := written(t, beside, 0)
		t.Run("vanishes", func(t *testing.T) {
			v, goal := mounted(t, g, fstype), disks[fstype]+160*miB
			must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
			pull(t, g, v)
			if !fallsShort(t, v, goal, resize(t, g, v, goal)) {
				t.Log("the growth was faster than the removal")
			}
			becomes(t, v, isGone)
			refused(t, resize(t, g, v, goal), codes.FailedPrecondition, v.GuestPath)
			isHealthy(t, beside)
			must(t, v.Detach(limited(t)))
			growsAgain(t, g, v, goal)
		})
		t.Run("fails every write", func(t *testing.T) {
			v, goal := mounted(t, g, fstype), disks[fstype]+160*miB
			kept := written(t, v, 4*miB)
			must(t, kept.Await(limited(t), 4*miB))
			isHealthy(t, v)
			must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
			must(t, v.BreakWrites(limited(t)))
			healsAtEnd(t, v)
			if !fallsShort(t, v, goal, resize(t, g, v, goal)) {
				t.Error("want an error\ngot  success with failing writes")
			}
			becomes(t, v, inaccessible)
			refused(t, resize(t, g, v, goal), codes.FailedPrecondition, v.GuestPath)
			isHealthy(t, beside)
			must(t, v.Heal(limited(t)))
			must(t, v.Unmount(limited(t)))
			if err := v.Mount(limited(t)); err != nil && !(fstype == "ext4" && strings.Contains(err.Error(), "e2fsck -y")) {
				t.Errorf("mounted again\nwant success, or for ext4 the name of its repair\ngot  %v", err)
			}
			must(t, v.Detach(limited(t)))
			if fstype == "ext4" {
				must(t, vm.RepairAll(limited(t), v.Path)) // e2fsck -p may refuse: see the reason above
			}
			growsAgain(t, g, v, goal)
			freshlyVerified(t, v, 4*miB)
		})
		must(t, beside.Resize(limited(t), 17*disks[fstype]))
		must(t, writer.Stop(limited(t)))
		freshlyVerified(t, beside, writer.Ledger().Bytes())
	})
}

// One block of group descriptors takes no write during a growth. The growth fails, but the journal
// has the descriptors. The kernel (6.1) writes the superblock with the new size all the same, and
// refuses the next mount, because it looks at the descriptors before the journal. The refusal names
// the programs that replay the journal first. Nothing is lost.
func TestJournalKeepsTheDescriptorsThatAGrowthCouldNotWrite(t *testing.T) {
	g := guest(t)
	for _, fstype := range []string{"ext3", "ext4"} {
		t.Run(fstype, func(t *testing.T) {
			v, goal := mounted(t, g, fstype), disks[fstype]+160*miB
			writer := written(t, v, 2*miB)
			must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
			must(t, v.BreakWritesAt(limited(t), firstDescriptors))
			healsAtEnd(t, v)
			if !fallsShort(t, v, goal, resize(t, g, v, goal)) {
				t.Error("want an error\ngot  success, although the descriptors cannot be written")
			}
			becomes(t, v, inaccessible)
			must(t, v.Unmount(limited(t)))
			must(t, v.Heal(limited(t)))
			if err := v.Mount(limited(t)); err != nil && !strings.Contains(err.Error(), "directvol rescue DISK, or e2fsck -p DISK") {
				t.Errorf("mounted again\nwant success, or the names of the programs that replay the journal\ngot  %v", err)
			} else {
				t.Logf("mounted again: %v", err)
			}
			must(t, v.Detach(limited(t)))
			_, err := vm.Repair(limited(t), v.Path) // e2fsck -p
			must(t, err)
			growsAgain(t, g, v, goal)
			freshlyVerified(t, v, writer.Ledger().Bytes())
		})
	}
}

// One block in the new part of the disk cannot be read: the bitmap of an inode table to be, of the
// first or of a later flex group (16 groups of 8 MiB). The growth fails before the kernel begins,
// and changes nothing. When the block is whole, the same call grows the volume.
//
// Without the agent's own read before the growth, the kernel (6.1) leaves the resize inode with
// blocks beyond the filesystem's end, which e2fsck -p leaves to its user.
func TestGrowthIntoAPartThatCannotBeReadChangesNothing(t *testing.T) {
	g := guest(t)
	const group, firstBlock = 8192, 1 // of blocks of 1 KiB
	for name, block := range map[string]uint64{
		"first flex group": firstBlock + 8*group + 8,   // behind the block bitmaps of groups 8 to 15
		"next flex group":  firstBlock + 16*group + 12, // of groups 16 to 27
	} {
		t.Run(name, func(t *testing.T) {
			v, goal := mounted(t, g, "ext4"), disks["ext4"]+160*miB
			writer := written(t, v, 2*miB)
			must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
			must(t, v.BreakReadsAt(limited(t), block*kiB))
			healsAtEnd(t, v)
			if !fallsShort(t, v, goal, resize(t, g, v, goal)) {
				t.Error("want an error\ngot  success, although the block cannot be read")
			}
			must(t, v.Heal(limited(t)))
			must(t, v.Detach(limited(t)))
			check, err := vm.Check(limited(t), "ext4", v.Path)
			must(t, err)
			if err := check.Err("ext4"); err != nil {
				t.Errorf("after the growth that failed: %v", err)
			}
			if has, err := vm.SizeOnDisk("ext4", v.Path); err != nil || has != disks["ext4"] {
				t.Errorf("size\nwant %d bytes\ngot  %d, error %v", disks["ext4"], has, err)
			}
			growsAgain(t, g, v, goal)
			freshlyVerified(t, v, writer.Ledger().Bytes())
		})
	}
}

// firstDescriptors is where the group descriptors begin on a new ext3 or ext4 of less than 512 MiB,
// which has blocks of 1 KiB: behind the superblock.
const firstDescriptors = 2 * kiB

// fallsShort reports whether the growth failed. If it did not, the new size must be on the disk.
func fallsShort(t *testing.T, v *vm.Volume, goal uint64, err error) bool {
	t.Helper()
	t.Logf("the growth: %v", err)
	if err != nil {
		if code := status.Code(err); code != codes.FailedPrecondition && code != codes.DeadlineExceeded {
			t.Errorf("\nwant %v or %v\ngot  %v", codes.FailedPrecondition, codes.DeadlineExceeded, err)
		}
		return true
	}
	has, err := vm.SizeOnDisk(v.FSType, v.Path)
	must(t, err)
	if has != goal {
		t.Errorf("success\nwant %d bytes in the superblock on the disk\ngot  %d", goal, has)
	}
	return false
}

// growsAgain mounts the volume and makes the call for a size again.
func growsAgain(t *testing.T, g *vm.Guest, v *vm.Volume, goal uint64) {
	t.Helper()
	must(t, v.Mount(limited(t)))
	isHealthy(t, v)
	must(t, resize(t, g, v, goal))
	has, err := vm.SizeOnDisk(v.FSType, v.Path)
	must(t, err)
	if has != goal {
		t.Errorf("the superblock on the disk\nwant %d bytes\ngot  %d", goal, has)
	}
}
