package volume

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// trimmable mounts a volume with a size in bytes, in a sparse image on a loop device, which takes
// discards.
func trimmable(t *testing.T, fstype string, bytes int64) (table *Table, dir, image string) {
	t.Helper()
	image = filepath.Join(t.TempDir(), fstype+".img")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, bytes); err != nil {
		t.Fatal(err)
	}
	mounttest.Format(t, fstype, image)
	dir = mounttest.Dir(t)
	mounttest.Mount(t, mounttest.Attach(t, image), dir, fstype, 0, "")
	table = newTable()
	t.Cleanup(func() { table.Forget(dir) })
	return table, dir, image
}

// fill writes a file with a size in bytes to a volume, and removes it.
func fill(t *testing.T, dir string, bytes int) {
	t.Helper()
	path := filepath.Join(dir, "file")
	file, err := os.Create(path)
	if err == nil {
		_, err = file.WriteString(strings.Repeat("x", bytes))
	}
	if err == nil {
		err = file.Sync()
	}
	if err == nil {
		err = file.Close()
	}
	if err == nil {
		err = os.Remove(path)
	}
	if err != nil {
		t.Fatal(err)
	}
	syncfs(t, dir)
}

func syncfs(t *testing.T, dir string) {
	t.Helper()
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	_ = unix.Syncfs(int(root.Fd()))
}

// stored returns how many bytes of a sparse file are stored.
func stored(t *testing.T, path string) int64 {
	t.Helper()
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		t.Fatal(err)
	}
	return s.Blocks * 512
}

func TestTrimGivesFreedBlocksBack(t *testing.T) {
	const file = 64 << 20
	for _, fstype := range []string{"ext3", "ext4", "xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			table, dir, image := trimmable(t, fstype, 9<<30)
			if _, err := table.Trim(t.Context(), dir, 0); err != nil { // of what mkfs has left
				t.Fatal(err)
			}
			before := table.Trimmed()
			fill(t, dir, file)
			full := stored(t, image)
			var all uint64
			mounttest.Await(t, fmt.Sprintf("%d bytes less than %d in the image", file, full), func() bool {
				trimmed, err := table.Trim(t.Context(), dir, 0)
				if err != nil || trimmed > 9<<30 {
					t.Fatalf("want each block trimmed once\ngot  %d bytes, error %v", trimmed, err)
				}
				all += trimmed
				return full-stored(t, image) > file*9/10
			})
			if counted := table.Trimmed() - before; counted != all || all < file*9/10 {
				t.Errorf("count of all trims\nwant %d more, and not less than the file had\ngot  %d", all, counted)
			}
		})
	}
}

// The addresses of a btrfs are not those of its disk, and grow with each block group that it makes:
// here they lie behind the disk's end.
func TestTrimOfABtrfsReachesEveryAddress(t *testing.T) {
	const file = 64 << 20
	table, dir, image := trimmable(t, "btrfs", 400<<20)
	for range 20 { // each moves everything to new addresses
		mounttest.Run(t, "btrfs", "balance", "start", "--full-balance", dir)
	}
	if _, err := table.Trim(t.Context(), dir, 0); err != nil {
		t.Fatal(err)
	}
	fill(t, dir, file)
	full := stored(t, image)
	trimmed, err := table.Trim(t.Context(), dir, 0)
	if now := stored(t, image); err != nil || full-now < file*9/10 {
		t.Errorf("the image\nwant %d bytes less than %d\ngot  %d, after a trim of %d, error %v", file, full, now, trimmed, err)
	}
}

// A call that is given up ends between two ranges, and the next one trims the volume to its end.
func TestTrimEndsBetweenTwoRanges(t *testing.T) {
	table, dir, _ := trimmable(t, "ext4", 3<<30)
	v, err := table.Lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	first, err := table.trimStep(ctx, v, 0, 0)
	if err != nil || first.next != 1<<30 || first.ended {
		t.Fatalf("the first range\nwant it to end at %d\ngot  %+v, error %v", 1<<30, first, err)
	}
	cancel()
	before := table.Trimmed()
	if _, err := table.Trim(ctx, dir, 0); errkind.Of(err) != errkind.DeadlineExceeded || table.Trimmed() != before {
		t.Errorf("given up\nwant a DeadlineExceeded and nothing trimmed\ngot  %v, %d bytes", err, table.Trimmed()-before)
	}
	if trimmed, err := table.Trim(t.Context(), dir, 0); err != nil || trimmed == 0 {
		t.Errorf("called again\nwant the rest trimmed\ngot  %d, error %v", trimmed, err)
	}
}

// A volume that is being trimmed can be unmounted between two ranges, and the directory below is
// not trimmed.
func TestVolumeIsUnmountedBetweenTwoRangesOfItsTrim(t *testing.T) {
	table, dir, _ := trimmable(t, "ext4", 3<<30)
	v, err := table.Lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := table.trimStep(t.Context(), v, 0, 0); err != nil {
		t.Fatal(err)
	}
	err = table.Quiet(t.Context(), dir, func() (bool, error) { return true, unix.Unmount(dir, 0) })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := table.trimStep(t.Context(), v, 1<<30, 0); errkind.Of(err) != errkind.NotFound {
		t.Errorf("want NotFound\ngot  %v", err)
	}
}

// Two trims of one disk take turns. A caller that cannot wait is refused.
func TestTrimWaitsForAnotherOfItsDisk(t *testing.T) {
	table, dir, _ := trimmable(t, "ext4", 320<<20)
	v, err := table.Lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	done, err := table.trims.Take(t.Context(), v.Device.Path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := table.Trim(ctx, dir, 0); errkind.Of(err) != errkind.DeadlineExceeded || !strings.Contains(err.Error(), "another trim") {
		t.Errorf("want a DeadlineExceeded that names the other trim\ngot  %v", err)
	}
	done()
	if _, err := table.Trim(t.Context(), dir, 0); err != nil {
		t.Error(err)
	}
}

func TestRefusedTrimNamesItsReason(t *testing.T) {
	for name, test := range map[string]struct {
		fstype string
		spoil  func(t *testing.T, dir, device string)
		least  uint64
		kind   errkind.Kind
		says   string
	}{
		"a disk without discards": {"xfs", func(t *testing.T, _, device string) {
			must(t, os.WriteFile("/sys/block/"+filepath.Base(device)+"/queue/discard_max_bytes", []byte("0"), 0))
		}, 0, errkind.FailedPrecondition, "discard=unmap"},
		"read-only": {"ext4", func(t *testing.T, dir, _ string) {
			must(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
		}, 0, errkind.FailedPrecondition, "cannot be trimmed: it is mounted read-only"},
		"shut down": {"xfs", func(t *testing.T, dir, _ string) {
			root, err := os.Open(dir)
			must(t, err)
			defer root.Close()
			must(t, unix.IoctlSetPointerInt(int(root.Fd()), 0x8004587d, 2)) // XFS_IOC_GOINGDOWN
		}, 0, errkind.FailedPrecondition, "cannot be trimmed: "},
		"recorded errors": {"ext4", func(t *testing.T, dir, device string) {
			must(t, os.WriteFile("/sys/fs/ext4/"+filepath.Base(device)+"/trigger_fs_error", []byte("x"), 0))
			syncfs(t, dir)
		}, 0, errkind.FailedPrecondition, "records errors (1)"},
		"too long a range": {"ext4", func(*testing.T, string, string) {}, 1 << 40, errkind.InvalidArgument, "least_bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			table, dir, _ := trimmable(t, test.fstype, 320<<20)
			v, err := table.Lookup(dir)
			must(t, err)
			test.spoil(t, dir, v.Device.Path)
			if _, err := table.Trim(t.Context(), dir, test.least); errkind.Of(err) != test.kind || !strings.Contains(fmt.Sprint(err), test.says) {
				t.Errorf("want kind %v, and %q\ngot  %v", test.kind, test.says, err)
			}
		})
	}
	if _, err := newTable().Trim(t.Context(), "/proc", 0); errkind.Of(err) != errkind.FailedPrecondition {
		t.Errorf("without a device\nwant a FailedPrecondition\ngot  %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
