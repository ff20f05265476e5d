package storage

import (
	"context"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
	"github.com/directvol/directvol/protocols/agentpb"
)

// found returns a request, and the disk that a call has found for it.
func found(t *testing.T, table *Table, s *agentpb.Storage) (request, origin) {
	t.Helper()
	r, err := parse(s)
	if err != nil {
		t.Fatal(err)
	}
	from, err := table.find(t.Context(), "storage", r)
	if err != nil {
		t.Fatal(err)
	}
	return r, from
}

// The disk that was found has left while the call waited, and another disk has its node and its
// number.
func TestDiskThatWasSwappedBeforeItsMountIsRefused(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "place")
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	table := newTable()
	r, from := found(t, table, onDisk(disk, "xfs", place))
	if from.device.Seq == 0 {
		t.Skip("this kernel numbers no disks (diskseq): run it on Linux 5.15 or newer")
	}
	mounttest.Reattach(t, disk, mounttest.Image(t, "xfs"))
	c := &call{holder: "c1"}
	err := table.needFound(t.Context(), c, r, from)
	if errkind.Of(err) != errkind.FailedPrecondition || len(c.needs) != 0 {
		t.Errorf("want it refused\ngot  %v, the call has %d storages", err, len(c.needs))
	}
	if top, err := mount.Topmost(place); top != nil || err != nil {
		t.Errorf("want nothing mounted\ngot  %v, error %v", top, err)
		mounttest.Unmount(t, place)
	}
	if err := hold(t, table, onDisk(disk, "xfs", place)); err != nil {
		t.Errorf("called again: %v", err)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}

// If a call has mounted another disk than the one that was found, the call unmounts it, because no
// later call would know it.
func TestMountOfAnotherDiskIsTakenBack(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "place")
	disk, other := mounttest.Attach(t, mounttest.Image(t, "xfs")), mounttest.Attach(t, mounttest.Image(t, "xfs"))
	table := newTable()
	r, from := found(t, table, onDisk(disk, "xfs", place))
	mounttest.Mount(t, other, place, "xfs", 0, "")
	from.path = other // the node leads to the other disk by now
	if err := takeBackOther(r, from); errkind.Of(err) != errkind.FailedPrecondition {
		t.Errorf("want it refused\ngot  %v", err)
	}
	if top, err := mount.Topmost(place); top != nil || err != nil {
		t.Errorf("want nothing mounted\ngot  %v, error %v", top, err)
	}
}

// While another call hangs at a disk, a call for the same disk gives up at its caller's deadline.
func TestCallIsGivenUpWhileAnotherHangsAtItsDevice(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "place")
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	table := newTable()
	done, err := table.devices.turns.Take(t.Context(), disk)
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	err = table.Hold(over, "c2", []*agentpb.Storage{onDisk(disk, "xfs", place)}, always)
	if errkind.Of(err) != errkind.DeadlineExceeded {
		t.Errorf("want it given up\ngot  %v", err)
	}
}

// A storage's disk has left, and somebody mounts the disk that has replaced it there, with other
// options. A call refuses that mount, as it does for a storage whose disk has stayed.
func TestReplacedDiskThatSomebodyHasMountedOtherwiseIsRefused(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "place")
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	table := newTable()
	s := onDisk(disk, "xfs", place)
	_, from := found(t, table, s)
	if from.device.Seq == 0 {
		t.Skip("this kernel numbers no disks (diskseq): run it on Linux 5.15 or newer")
	}
	if err := hold(t, table, s); err != nil {
		t.Fatal(err)
	}
	_ = table.volumes.Quiet(t.Context(), place, func() (bool, error) { return true, unix.Unmount(place, 0) })
	mounttest.Reattach(t, disk, mounttest.Image(t, "xfs"))
	for _, flags := range []uintptr{unix.MS_NOEXEC, 0} {
		mounttest.Mount(t, disk, place, "xfs", flags, "")
		err := hold(t, table, s)
		if refused := flags != 0; (errkind.Of(err) == errkind.AlreadyExists) != refused || !refused && err != nil {
			t.Errorf("flags %x\nwant refused %v\ngot  %v", flags, refused, err)
		}
		if flags != 0 {
			mounttest.Unmount(t, place)
		}
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}
