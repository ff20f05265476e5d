package qemu

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/host/trial/trialtest"
)

// To return one store's size, QEMU asks every store for its size (query-named-block-nodes), in its
// main loop. With one hanging store the VM blocked whenever any disk was attached, grown or
// detached.
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

func TestRealQEMUGrowsADiskBesideAStoreThatHangs(t *testing.T) {
	hung, stop, answer := trialtest.Serve(t)
	vm := realVM(t)
	t.Cleanup(answer) // runs before the VM is killed
	for id, path := range map[string]string{"hung": hung, "other": image(t, mib)} {
		_, err := vm.AttachDisk(limited(t), Disk{ID: id, Path: path})
		must(t, err)
	}
	forget(t, hung)
	stop()
	must(t, vm.ResizeDisk(limited(t), "other", 2*mib))
	_, err := vm.AttachDisk(limited(t), Disk{ID: "third", Path: image(t, mib)})
	must(t, err)
}

// A new process first closes the descriptors that it inherited. If a hanging store is open, QEMU
// does not start, and Start must return an error in time.
func TestStartEndsInTimeBesideAStoreThatHangs(t *testing.T) {
	needsQEMU(t)
	hung, stop, answer := trialtest.Serve(t)
	store, err := os.OpenFile(hung, os.O_RDWR, 0)
	must(t, err)
	defer store.Close()
	defer answer() // runs before the store is closed
	stop()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	dir := shortDir(t)
	if _, err := Start(ctx, Config{Dir: dir, GuestCID: 3, Directvol: "/nonexistent", Stores: testStores(t)}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("want %v\ngot  %v", context.DeadlineExceeded, err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the VM's directory is left: %v", err)
	}
}

// forget makes the kernel forget a store's cached size and times.
func forget(t *testing.T, path string) {
	t.Helper()
	store, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	_, err = store.Write(make([]byte, 512))
	must(t, err)
	must(t, store.Close())
}

// Reading the size of a hanging store occupies a thread that no signal ends. A growth must give up
// in time, and at most one of them may have such a thread.
func TestGrowthOfADiskWhoseStoreHangsEndsInTime(t *testing.T) {
	hung, stop, answer := trialtest.Serve(t)
	vm, _ := fakeVM(t)
	_, err := vm.AttachDisk(limited(t), Disk{ID: "hung", Path: hung})
	must(t, err)
	grow := func(ctx context.Context) error { return vm.ResizeDisk(ctx, "hung", 2*mib) }
	forget(t, hung)
	stop()
	said := []string{"has not answered", "another call works on it", "another call works on it"}
	for _, want := range said {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if err := grow(ctx); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, %v\ngot  %v", want, context.DeadlineExceeded, err)
		}
		cancel()
	}
	answer()
	if err := grow(limited(t)); err != nil {
		t.Errorf("when it answers: %v", err)
	}
}

func TestStartEndsInTimeWithABootDiskThatHangs(t *testing.T) {
	hung, stop, answer := trialtest.Serve(t)
	disks := newDiskTable(1, testStores(t), "the test")
	forget(t, hung)
	stop()
	defer answer()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := disks.addBoot(ctx, 0, Disk{ID: "boot", Path: hung}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("want %v\ngot  %v", context.DeadlineExceeded, err)
	}
}
