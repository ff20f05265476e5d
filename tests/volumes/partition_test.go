package volumes

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/vm"
)

const (
	sectorBytes    = 512
	partitionBytes = 64 * miB
)

// parted writes a partition table (UEFI 2.10, 5.2.1: legacy MBR) to a scratch volume's image, and
// makes an ext4 in each of its two partitions.
func parted(t *testing.T, image string) {
	t.Helper()
	must(t, os.Truncate(image, 0))
	must(t, os.Truncate(image, miB+2*partitionBytes))
	table := make([]byte, sectorBytes)
	table[510], table[511] = 0x55, 0xaa
	for i := range 2 {
		start := miB + i*partitionBytes
		entry := table[446+16*i:]
		entry[4] = 0x83 // Linux
		binary.LittleEndian.PutUint32(entry[8:], uint32(start/sectorBytes))
		binary.LittleEndian.PutUint32(entry[12:], partitionBytes/sectorBytes)
		out, err := exec.CommandContext(limited(t), "mkfs.ext4", "-q", "-F", "-E", fmt.Sprintf("offset=%d", start), image, fmt.Sprintf("%dk", partitionBytes/kiB)).CombinedOutput()
		if err != nil {
			t.Fatalf("mkfs.ext4: %v\n%s", err, out)
		}
	}
	file, err := os.OpenFile(image, os.O_WRONLY, 0)
	must(t, err)
	_, err = file.WriteAt(table, 0)
	must(t, errors.Join(err, file.Close()))
}

// partedDisk attaches a disk with two partitions, and returns the disk's node in the guest.
func partedDisk(t *testing.T, g *vm.Guest, id string) (*vm.Volume, string) {
	t.Helper()
	v, err := g.Volume(limited(t), id, "ext4", int64(partitionBytes))
	must(t, err)
	parted(t, v.Path)
	must(t, g.Attach(limited(t), v.Volume))
	device, err := g.DeviceOf(limited(t), v.DiskID())
	must(t, err)
	return v, device
}

// The kernel logs a failed request with the name and the sector of the whole disk. The agent must
// report the failure only for the partition that contains the sector. And the disk is not released
// while one of its partitions is mounted.
//
//	a disk ─┬─ partition 1: the volume
//	        └─ partition 2: another one, read-only, so that no request of its own fails
func TestFailedRequestsBelongToTheirPartitions(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	v, device := partedDisk(t, g, "parted")
	disk, _ := g.VM().Disk(v.DiskID())
	paths := [2]string{"/run/test/partition-1", "/run/test/partition-2"}
	for i, options := range [][]string{nil, {"ro", "noload"}} {
		must(t, container(t, g, fmt.Sprintf("part-%d", i+1), &agentpb.Storage{
			Driver: "blk", Source: fmt.Sprintf("%s%d", device, i+1), Fstype: "ext4", MountPoint: paths[i], Options: options, DriverOptions: []string{"serial=" + v.DiskID()},
		}))
	}
	refused(t, g.Agent().CheckReleased(limited(t), "blk", disk.PCIPath, ""), codes.FailedPrecondition, device)
	refused(t, v.Detach(limited(t)), codes.FailedPrecondition, device)
	v.GuestPath = paths[0]
	failOneWrite(t, g, v)
	failOneRead(t, g, v)
	names(t, v, device+"1", failedOnce, readsFailed)
	if other, err := g.Agent().GetVolumeHealth(limited(t), paths[1]); err != nil || !nothing(other) {
		t.Errorf("the other partition\nwant nothing wrong\ngot  %v, error %v", conditions(other), err)
	}

	writer := written(t, v, 0)
	must(t, v.Hang(limited(t)))
	becomes(t, v, hung)
	names(t, v, device+"1", hung)
	must(t, v.Heal(limited(t)))
	becomes(t, v, func(all []*volumepb.Condition) bool { return !hung(all) && !slow(all) })
	must(t, writer.Stop(limited(t)))
	if got, err := v.Verify(limited(t), nil); err != nil || got != writer.Ledger().Bytes() {
		t.Errorf("what was acknowledged\nwant %d bytes\ngot  %d, error %v", writer.Ledger().Bytes(), got, err)
	}

	pull(t, g, v)
	becomes(t, v, isGone)
	names(t, v, device+"1", isGone)
	remove(t, g, "part-1")
	remove(t, g, "part-2")
	v.GuestPath = ""
	must(t, v.Detach(limited(t)))
}

// A partition does not grow with its disk: waiting for it does not help, and the caller learns what
// does, before the disk has grown.
func TestVolumeOnAPartitionIsRefusedWithTheSteps(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	v, device := partedDisk(t, g, "part")
	const path = "/run/test/part"
	must(t, container(t, g, "part", &agentpb.Storage{
		Driver: "blk", Source: device + "2", Fstype: "ext4", MountPoint: path, DriverOptions: []string{"serial=" + v.DiskID()},
	}))
	for _, size := range []uint64{miB + 2*partitionBytes, 256 * miB} {
		refused(t, g.Agent().CheckResizeVolume(limited(t), path, size), codes.FailedPrecondition, device+"2 is a partition of", "growpart", "size 0")
		refused(t, g.Agent().ResizeVolume(limited(t), path, size), codes.FailedPrecondition, device+"2 is a partition of", "growpart", "size 0")
	}
	must(t, g.Agent().ResizeVolume(limited(t), path, 0))
	must(t, g.Agent().ResizeVolume(limited(t), path, partitionBytes))
	remove(t, g, "part")
	must(t, v.Detach(limited(t)))
}

// failOneRead makes a read of a file's content fail, and returns when the agent has remembered the
// failure.
func failOneRead(t *testing.T, g *vm.Guest, v *vm.Volume) {
	t.Helper()
	must(t, v.Touch(limited(t)))
	must(t, g.Remote.WriteFile(limited(t), "/proc/sys/vm/drop_caches", []byte("1")))
	must(t, v.BreakReads(limited(t)))
	if _, err := g.Remote.ReadFile(limited(t), v.GuestPath+"/touched"); !errors.Is(err, unix.EIO) {
		t.Fatalf("a read from a broken disk\nwant EIO\ngot  %v", err)
	}
	must(t, v.Heal(limited(t)))
	becomes(t, v, readsFailed)
}

// names fails unless a volume's conditions are the wanted ones, and each names the device.
func names(t *testing.T, v *vm.Volume, device string, wanted ...func([]*volumepb.Condition) bool) {
	t.Helper()
	all, err := v.Health(limited(t))
	must(t, err)
	for _, is := range wanted {
		if !is(all) {
			t.Errorf("%s is %v", v.ID, conditions(all))
		}
	}
	for _, c := range all {
		if !strings.Contains(c.Message, device+":") {
			t.Errorf("want it to name %s\ngot  %s", device, c.Message)
		}
	}
}
