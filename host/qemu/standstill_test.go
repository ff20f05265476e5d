package qemu

import (
	"slices"
	"testing"
)

// QEMU asks every store for its size where it is asked for that of one (query-named-block-nodes), in its main loop: with one store
// that hangs the VM stood still whenever any disk came, grew or went.
func TestDisksComeGrowAndGoWithoutALookAtOtherStores(t *testing.T) {
	vm, q := fakeVM(t)
	for range 2 {
		_, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)})
		must(t, err)
		must(t, vm.ResizeDisk(limited(t), "data", 2*mib))
		_, err = vm.state(limited(t))
		must(t, err)
		must(t, vm.DetachDisk(limited(t), "data"))
	}
	q.with(func() {
		if slices.Contains(q.commands, "query-named-block-nodes") {
			t.Errorf("QEMU was asked for the sizes of all stores: %q", q.commands)
		}
	})
}
