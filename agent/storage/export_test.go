package storage

import (
	"context"
	"maps"
	"slices"
)

// FakeKernel replaces the kernel for storages with the driver FakeDriver, so that a test can make a
// disk hang or a mount fail at a chosen moment.
type FakeKernel interface {
	Find(ctx context.Context, source string) error
	Mount(source, mountPoint string) error
	Unmount(mountPoint string) error
	CouldUnmount(ctx context.Context, mountPoint string) error
	Mounted(source, mountPoint string) bool
}

// FakeDriver is a value of Storage.driver while a fake kernel is set.
const FakeDriver = "fake"

// SetFakeKernel makes the driver FakeDriver use k from now on.
func SetFakeKernel(k FakeKernel) (undo func()) {
	drivers = append(drivers, &driver{
		name:  FakeDriver,
		check: func(request) error { return nil },
		find: func(ctx context.Context, r request) (origin, error) {
			return origin{path: r.source}, k.Find(ctx, r.source)
		},
		mount: func(_ context.Context, _ *devices, r request, from origin) (did, error) {
			return did{}, k.Mount(from.path, r.mountPoint)
		},
		unmount: func(m *mounted) error { return k.Unmount(m.mountPoint) },
		couldGo: func(ctx context.Context, _ *Table, m *mounted, _ bool) error {
			return k.CouldUnmount(ctx, m.mountPoint)
		},
		there: func(m *mounted) (bool, error) { return k.Mounted(m.from.path, m.mountPoint), nil },
	})
	return func() { drivers = drivers[:len(drivers)-1] }
}

// Owners returns the holders of the storage at a mount point, and those for whom calls in progress
// need it.
func (t *Table) Owners(mountPoint string) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.mounts[mountPoint]
	if m == nil {
		return nil
	}
	return m.heldOrNeeded()
}

// MountPoints returns the mount points of all storages in the table.
func (t *Table) MountPoints() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(maps.Keys(t.mounts))
}
