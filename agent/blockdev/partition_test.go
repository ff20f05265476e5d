package blockdev

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPartitionIsPartOfItsDisk(t *testing.T) {
	root := t.TempDir()
	disk := filepath.Join(root, "sys/devices/virtio1/block/vda")
	part := filepath.Join(disk, "vda1")
	numbers := filepath.Join(root, "sys/dev/block")
	err := errors.Join(os.MkdirAll(part, 0o755), os.MkdirAll(numbers, 0o755),
		os.Symlink("../../devices/virtio1/block/vda", filepath.Join(numbers, "254:0")),
		os.Symlink("../../devices/virtio1/block/vda/vda1", filepath.Join(numbers, "254:1")))
	for file, text := range map[string]string{"partition": "1\n", "start": "2048\n", "size": "1000\n"} {
		err = errors.Join(err, os.WriteFile(filepath.Join(part, file), []byte(text), 0o644))
	}
	if err != nil {
		t.Fatal(err)
	}
	want := Partition{"vda", 2048, 1000}
	if got, ok := PartitionOf(root, unix.Mkdev(254, 1)); got != want || !ok {
		t.Errorf("want %+v\ngot  %+v, %v", want, got, ok)
	}
	for name, minor := range map[string]uint32{"a whole disk": 0, "a device that is gone": 2} {
		if got, ok := PartitionOf(root, unix.Mkdev(254, minor)); ok {
			t.Errorf("%s is taken for %+v", name, got)
		}
	}
	if err := os.WriteFile(filepath.Join(part, "size"), []byte("-1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, ok := PartitionOf(root, unix.Mkdev(254, 1)); ok {
		t.Errorf("a size that is not a number: got %+v", got)
	}
	for sector, has := range map[uint64]bool{0: false, 2047: false, 2048: true, 3047: true, 3048: false, math.MaxUint64: false} {
		if want.Has(sector) != has {
			t.Errorf("sector %d\nwant in it: %v", sector, has)
		}
	}
}
