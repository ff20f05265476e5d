package filesystem

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

func TestBtrfsSuperblockOfRealMkfs(t *testing.T) {
	for _, options := range [][]string{nil, {"-s", "4096", "-n", "65536"}, {"--csum", "blake2"}, {"-m", "single"}} {
		image := mounttest.Image(t, "btrfs", options...)
		disk := open(t, image)
		s, err := readBtrfsSuper(disk)
		if err != nil || s.blockSize != 4096 || s.bytes != 320<<20 || s.devices != 1 || s.device != 1 {
			t.Errorf("mkfs.btrfs %v\ngot %+v, error %v", options, s, err)
		}
		if got := Identify(disk); got != "btrfs" {
			t.Errorf("mkfs.btrfs %v\nwant btrfs\ngot  %q", options, got)
		}
		want, err := exec.Command("blkid", "-p", "-o", "value", "-s", "UUID", image).Output()
		if got, err2 := btrfsUUID(disk); err == nil && (err2 != nil || got != strings.TrimSpace(string(want))) {
			t.Errorf("its UUID\nwant %s\ngot  %s, error %v", want, got, err2)
		}
	}
}

// A disk of a btrfs with two devices cannot be mounted alone, and does not say which one grows.
func TestBtrfsWithTwoDevicesIsRefusedByItsNumber(t *testing.T) {
	images := []string{mounttest.Image(t, "btrfs"), mounttest.Image(t, "ext4")}
	mounttest.Run(t, "mkfs.btrfs", "-q", "-f", images[0], images[1])
	for i, image := range images {
		disk := open(t, image)
		s, err := readBtrfsSuper(disk)
		if err != nil || s.devices != 2 || s.device != uint64(i+1) {
			t.Errorf("device %d\ngot %+v, error %v", i+1, s, err)
		}
		if got := btrfsMountRefused(disk, unix.ENOENT); !strings.Contains(got, "2 devices") {
			t.Errorf("device %d, not mounted\nwant a reason that says 2 devices\ngot  %q", i+1, got)
		}
		if err := s.canGrow("/dev/vda", s.bytes/s.blockSize+1); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "2 devices") {
			t.Errorf("device %d, grown\nwant a FailedPrecondition that says 2 devices\ngot  %v", i+1, err)
		}
		if err := s.canGrow("/dev/vda", s.bytes/s.blockSize); err != nil {
			t.Errorf("device %d, as it is: %v", i+1, err)
		}
	}
}

func TestBtrfsBelowTheLeastSizeIsRefused(t *testing.T) {
	s := btrfsSuper{devices: 1, device: 1, blockSize: 4096, bytes: 128 << 20}
	if err := s.canGrow("/dev/vda", 200<<20/4096); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "268435456") {
		t.Errorf("want a FailedPrecondition that names the least size\ngot  %v", err)
	}
	if err := s.canGrow("/dev/vda", 256<<20/4096); err != nil {
		t.Errorf("to the least size: %v", err)
	}
}

func FuzzBtrfsSuper(f *testing.F) {
	const used = 0xd9 // the end of the last field that is read
	super := make([]byte, used)
	copy(super[0x40:], btrfsMagic)
	for at, value := range map[int]uint64{0x88: 1, 0x90: 4096, 0xc9: 1, 0xd1: 320 << 20} {
		binary.LittleEndian.PutUint64(super[at:], value)
	}
	f.Add(super)
	f.Add(super[:used-1])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= used && len(b) < btrfsSuperSize { // the fuzzer is a thousand times as fast with short inputs
			b = append(b, make([]byte, btrfsSuperSize-len(b))...)
		}
		s, err := parseBtrfsSuper(b)
		if err != nil {
			return
		}
		if g := s.geometry(); g.BlockSize < 512 || g.Blocks == 0 || g.Bytes() > s.bytes || s.bytes-g.Bytes() >= g.BlockSize || s.devices == 0 {
			t.Errorf("an invalid superblock was accepted: %+v", s)
		}
		if err := s.canGrow("", s.bytes/s.blockSize); err != nil {
			t.Errorf("%+v as it is: %v", s, err)
		}
	})
}

// btrfsOn mounts a btrfs of 320 MiB on a disk of bytes.
func btrfsOn(t *testing.T, bytes int64) Mounted {
	t.Helper()
	image := mounttest.Image(t, "btrfs")
	disk, dir := mounttest.Attach(t, image), mounttest.Dir(t)
	mounttest.SetSize(t, disk, image, bytes)
	mounttest.Mount(t, disk, dir, "btrfs", 0, "")
	m, err := Open(dir, disk, &Proven{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// endsAt fails unless the kernel and the superblock on the disk have the same end.
func endsAt(t *testing.T, m Mounted, bytes uint64) {
	t.Helper()
	inMemory, err := btrfsGeometry(m)
	onDisk, err2 := btrfsOnDisk(m.Disk)
	if err := errors.Join(err, err2); err != nil || inMemory.Bytes() != bytes || onDisk.Bytes() != bytes {
		t.Errorf("its end\nwant %d\ngot  %d in memory, %d on the disk, error %v", bytes, inMemory.Bytes(), onDisk.Bytes(), err)
	}
}

// When Grow returns, the new size is in the superblock on the disk. A request for less than there
// is changes nothing, and so does one for more than the device has.
func TestGrownBtrfsIsOnItsDisk(t *testing.T) {
	const mib = 1 << 20
	m := btrfsOn(t, 640*mib)
	var steps []uint64
	m.Step = func(blocks uint64) { steps = append(steps, blocks*4096/mib) }
	for _, c := range []struct{ blocks, want uint64 }{
		{400 * mib / 4096, 400 * mib}, {400 * mib / 4096, 400 * mib}, {330 * mib / 4096, 400 * mib}, {640 * mib / 4096, 640 * mib}, {1, 640 * mib},
	} {
		if err := btrfs.CanGrow(m, c.blocks); err != nil {
			t.Error(err)
		}
		if err := btrfs.Grow(t.Context(), m, c.blocks); err != nil {
			t.Errorf("to %d blocks: %v", c.blocks, err)
		}
		endsAt(t, m, c.want)
		if m.Proven.kept != c.want/4096 {
			t.Errorf("proven\nwant %d blocks\ngot  %d", c.want/4096, m.Proven.kept)
		}
	}
	if len(steps) != 2 || steps[0] != 400 || steps[1] != 640 {
		t.Errorf("steps\nwant 400 and 640 MiB\ngot  %d", steps)
	}
	if err := btrfsAdd(m, 1, 4096); err != nil {
		t.Errorf("beyond the device: %v", err)
	}
	endsAt(t, m, 640*mib)
	if err := btrfs.Settle(t.Context(), m); err != nil {
		t.Error(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := btrfs.Grow(ended, m, 1000*mib/4096); !errors.Is(err, context.Canceled) {
		t.Errorf("by a caller that has gone\nwant it not begun\ngot  %v", err)
	}
	if err := btrfsCommit(m); err != nil {
		t.Error(err)
	}
}

// Another grower always asks for the device's end, while we ask for less.
func TestTwoGrowersNeverShrinkABtrfs(t *testing.T) {
	const mib, step = 1 << 20, 8 << 20
	image := mounttest.Image(t, "btrfs")
	disk, dir := mounttest.Attach(t, image), mounttest.Dir(t)
	mounttest.Mount(t, disk, dir, "btrfs", 0, "")
	m, err := Open(dir, disk, &Proven{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	for size := int64(320*mib + step); size < 800*mib; size += step {
		mounttest.SetSize(t, disk, image, size)
		before, err := btrfsGeometry(m)
		if err != nil {
			t.Fatal(err)
		}
		other := make(chan error)
		go func() { other <- btrfsToTheEnd(dir) }()
		if err := btrfs.Grow(t.Context(), m, uint64(size-step/2)/4096); err != nil && !errors.Is(err, unix.EBUSY) {
			t.Error(err)
		}
		theirs := <-other
		want := before.Bytes()
		if theirs == nil {
			want = uint64(size)
		} else if !errors.Is(theirs, unix.EBUSY) {
			t.Error(theirs)
		}
		if got, err := btrfsGeometry(m); err != nil || got.Bytes() < want || got.Bytes() > uint64(size) {
			t.Fatalf("on a disk of %d\nwant at least %d\ngot  %d, error %v", size, want, got.Bytes(), err)
		}
	}
}

// btrfsToTheEnd does what btrfs filesystem resize max does.
func btrfsToTheEnd(dir string) error {
	out, err := exec.Command("btrfs", "filesystem", "resize", "max", dir).CombinedOutput()
	if err != nil && strings.Contains(string(out), "in progress") {
		return unix.EBUSY
	}
	if err != nil {
		return errors.Join(err, errors.New(string(out)))
	}
	return nil
}

// While a balance runs, the kernel refuses a resize with a number that is no errno.
func TestResizeOfABusyBtrfsIsToBeTriedAgain(t *testing.T) {
	m := btrfsOn(t, 640<<20)
	if err := os.WriteFile(m.Dir.Name()+"/file", make([]byte, 128<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	uuid, err := btrfsUUID(m.Disk)
	if err != nil {
		t.Fatal(err)
	}
	does := func() string {
		text, err := os.ReadFile("/sys/fs/btrfs/" + uuid + "/exclusive_operation")
		if err != nil {
			t.Skipf("it waits for a balance: %v: it needs Linux 5.10", err)
		}
		return strings.TrimSpace(string(text))
	}
	does()
	balanced := make(chan error, 1)
	for seen := false; !seen; { // one may be over before it is seen
		go func() {
			balanced <- exec.Command("btrfs", "balance", "start", "--full-balance", m.Dir.Name()).Run()
		}()
		mounttest.Await(t, "a balance", func() bool {
			seen = does() == "balance"
			return seen || len(balanced) > 0
		})
		if !seen {
			if err := <-balanced; err != nil {
				t.Fatal(err)
			}
		}
	}
	err = btrfsAdd(m, 1, 4096)
	if still := does(); !errors.Is(err, unix.EBUSY) && still == "balance" {
		t.Errorf("beside a balance\nwant EBUSY\ngot  %v", err)
	}
	if err := <-balanced; err != nil {
		t.Error(err)
	}
}

// A btrfs that somebody has made read-only has not stopped, and nothing is written to it.
func TestReadOnlyBtrfsHasNotStopped(t *testing.T) {
	m := btrfsOn(t, 320<<20)
	for _, flags := range []uintptr{0, unix.MS_RDONLY} {
		if err := unix.Mount("", m.Dir.Name(), "", unix.MS_REMOUNT|flags, ""); err != nil {
			t.Fatal(err)
		}
		if btrfsStopped(m.Dir) {
			t.Errorf("mounted with %#x\nwant it not stopped", flags)
		}
	}
	if err := btrfsAdd(m, 1, 4096); !errors.Is(err, unix.EROFS) {
		t.Errorf("grown, read-only\nwant EROFS\ngot  %v", err)
	}
}
