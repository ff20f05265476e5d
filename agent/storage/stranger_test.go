package storage

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
	"github.com/directvol/directvol/protocols/agentpb"
)

// recovered returns the table of an agent that has read a state of this boot.
func recovered(t *testing.T, state, text string) (*Table, error) {
	t.Helper()
	table := stateful(t, state)
	if err := os.WriteFile(state, []byte(strings.ReplaceAll(text, "BOOT", table.state.Header(0).Boot)), 0o600); err != nil {
		t.Fatal(err)
	}
	return table, table.Recover()
}

// The state of an older agent has fewer fields, and that of a later agent has more.
func TestStateOfAnotherVersionIsReadAndKept(t *testing.T) {
	for name, version := range map[string]string{
		"older": `{"version":1,"boot_id":"BOOT","storages":[{"driver":"local","source":"local","mount_point":"PLACE","device":"local","holders":["c1"]}]}`,
		"later": `{"version":7,"boot_id":"BOOT","mood":{"is":"good"},"storages":[{"driver":"local","source":"local","mount_point":"PLACE","device":"local","holders":["c1"],"colour":["red"]}]}`,
	} {
		dir := ownDir(t)
		place, state := filepath.Join(dir, "volume"), filepath.Join(dir, "state.json")
		if err := os.Mkdir(place, 0o700); err != nil {
			t.Fatal(err)
		}
		table, err := recovered(t, state, strings.ReplaceAll(version, "PLACE", place))
		if err != nil || len(table.Mounted()) != 1 {
			t.Fatalf("%s\nwant its storage\ngot  %v, error %v", name, table.Mounted(), err)
		}
		text, err := os.ReadFile(state)
		var got, want map[string]any
		was := strings.ReplaceAll(strings.ReplaceAll(version, "PLACE", place), "BOOT", table.state.Header(0).Boot)
		if err != nil || json.Unmarshal(text, &got) != nil || json.Unmarshal([]byte(was), &want) != nil {
			t.Fatal(err)
		}
		want["version"] = max(want["version"].(float64), stateVersion)
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s, written again\nwant %v\ngot  %v, error %v", name, want, got, err)
		}
		if err := table.Release(t.Context(), "c1"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// RemoveContainer does not answer OK while there is a mount that the agent does not know.
func TestMountThatIsNotUnderstoodKeepsItsContainer(t *testing.T) {
	for name, c := range map[string]struct{ holders, free string }{"of its holder": {`["c1"]`, "c2"}, "of anybody": {`[]`, ""}} {
		dir := ownDir(t)
		place, state := filepath.Join(dir, "volume"), filepath.Join(dir, "state.json")
		mounttest.Mount(t, "tmpfs", place, "tmpfs", 0, "")
		table, err := recovered(t, state, fmt.Sprintf(`{"version":2,"boot_id":"BOOT","storages":[{"driver":"later","mount_point":%q,"holders":%s}]}`, place, c.holders))
		if err == nil {
			t.Errorf("%s: it was taken over", name)
		}
		for range 2 { // also after a restart
			if err := table.Release(t.Context(), "c1"); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), place) {
				t.Errorf("%s: want it refused and named\ngot  %v", name, err)
			}
			if c.free != "" {
				if err := table.Release(t.Context(), c.free); err != nil {
					t.Errorf("%s: another container: %v", name, err)
				}
			}
			if err := table.state.Close(); err != nil {
				t.Fatal(err)
			}
			table = stateful(t, state)
			_ = table.Recover() // fails in the same way again
		}
		if err := table.ReleaseAll(t.Context(), always); err != nil {
			t.Errorf("%s, at the sandbox's end: %v", name, err)
		}
		if err := table.Release(t.Context(), "c1"); err != nil {
			t.Errorf("%s, when it is gone: %v", name, err)
		}
	}
}

func TestMountsOfAStateThatCannotBeReadAreThoseOfStorages(t *testing.T) {
	const place = storageRoot + "sandbox/storage/MDIvMDE="
	found := strangersOf([]*mount.Info{
		{Mountpoint: "/", Major: 254}, {Mountpoint: "/boot", Major: 254}, {Mountpoint: storageRoot + "shared", Major: 0}, {Mountpoint: place, Major: 254, Source: "/dev/vda", FSType: "xfs"},
	})
	if len(found) != 1 || found[0].mountPoint != place || !found[0].mayHold("anybody") {
		t.Errorf("want %s, anybody's\ngot  %+v", place, found)
	}
}

// besideStranger returns a table that does not know the mount at a place, except that its holder is
// c1.
func besideStranger(t *testing.T, place string) *Table {
	t.Helper()
	table, err := recovered(t, filepath.Join(t.TempDir(), "state.json"), fmt.Sprintf(`{"version":3,"boot_id":"BOOT","storages":[{"driver":"later","mount_point":%q,"holders":["c1"]}]}`, place))
	if err == nil {
		t.Fatal("it is no stranger")
	}
	return table
}

func remaining(t *testing.T, table *Table) ([]stranger, error) {
	t.Helper()
	return table.remaining(t.Context(), func(stranger) bool { return true })
}

// A container that asks for another container's mount does not hold it alone: the other container
// was not removed yet.
func TestStrangerThatIsTakenOverKeepsItsHolders(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "volume")
	mounttest.Mount(t, "shm", place, "tmpfs", 0, "")
	table := besideStranger(t, place)
	s := &agentpb.Storage{Driver: "ephemeral", Source: "shm", Fstype: "tmpfs", MountPoint: place}
	if err := table.Hold(t.Context(), "c2", []*agentpb.Storage{s}, func() bool { return false }); err == nil {
		t.Fatal("it is held for a caller that hung up")
	}
	if err := table.Hold(t.Context(), "c2", []*agentpb.Storage{s}, always); err != nil {
		t.Fatal(err)
	}
	if err := table.Release(t.Context(), "c2"); err != nil {
		t.Fatal(err)
	}
	if top, err := mount.Topmost(place); top == nil || err != nil {
		t.Fatalf("want it mounted for c1\ngot  %v, error %v", top, err)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Fatal(err)
	}
	if top, err := mount.Topmost(place); top != nil || err != nil {
		t.Errorf("want it gone with its last holder\ngot  %v, error %v", top, err)
	}
}

// A stranger's disk hangs in a flush while the last mount ends, and nobody sees that mount any
// more. The stranger is remembered until its disk is free.
func TestStrangerThatHangsInItsUnmountStaysAStranger(t *testing.T) {
	file, server := mounttest.ServeDisk(t, mounttest.Image(t, "xfs"))
	disk, place := mounttest.Attach(t, file), filepath.Join(mounttest.Dir(t), "volume")
	mounttest.Mount(t, disk, place, "xfs", 0, "")
	table := besideStranger(t, place)
	all, err := table.leavers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	leaving := table.leave(t.Context(), all)
	if err := leaving.await(t.Context()); err != nil {
		t.Fatal(err)
	}
	release := server.HoldFlushes()
	defer release()
	late, over := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer over()
	if err := leaving.letGo(late); errkind.Of(err) != errkind.DeadlineExceeded || !strings.Contains(err.Error(), place) {
		t.Errorf("its last mount\nwant it given up, and named\ngot  %v", err)
	}
	leaving.decide(false)
	if err := table.Release(t.Context(), "c1"); errkind.Of(err) != errkind.FailedPrecondition {
		t.Errorf("its container, meanwhile\nwant it refused\ngot  %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := table.ReleaseAll(ctx, always); errkind.Of(err) != errkind.DeadlineExceeded || !strings.Contains(err.Error(), place) {
		t.Errorf("destroyed, meanwhile\nwant it given up, and the mount named\ngot  %v", err)
	}
	release()
	if err := table.ReleaseAll(t.Context(), always); err != nil {
		t.Errorf("destroyed: %v", err)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Errorf("its container, then: %v", err)
	}
	free, err := claim(disk)
	if err != nil {
		t.Fatal(err)
	}
	free.Close()
}

// A destroy has failed, and is still at a stranger whose path leads through a server that hangs.
// The end of another container proves its disk free nevertheless: the stranger is on that disk,
// too.
func TestStrangerThatStillLeavesAfterADestroyDoesNotHideThatADiskIsInUse(t *testing.T) {
	disk, place := mounttest.Attach(t, mounttest.Image(t, "xfs")), filepath.Join(mounttest.Dir(t), "place")
	folder, server := mounttest.ServeFolder(t)
	mounttest.Mount(t, disk, folder, "xfs", 0, "")
	table := besideStranger(t, folder)
	s := &agentpb.Storage{Driver: "blk", Source: disk, Fstype: "xfs", MountPoint: place}
	if err := table.Hold(t.Context(), "c2", []*agentpb.Storage{s}, always); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(place, unix.MNT_DETACH) })
	all, err := table.leavers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	release := server.HoldLookups()
	defer release()
	guard := time.AfterFunc(time.Minute, release) // then all calls that wait for the server return
	leaving := table.leave(t.Context(), append(table.heldBy(func(*mounted) bool { return true }), all...))
	for _, one := range leaving.all {
		if one.mountPoint != folder {
			<-one.last.done
		}
	}
	late, over := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer over()
	if err := leaving.await(late); errkind.Of(err) != errkind.DeadlineExceeded || !strings.Contains(err.Error(), folder) {
		t.Errorf("destroyed\nwant it given up, and %s named\ngot  %v", folder, err)
	}
	leaving.decide(false)
	if err := table.Release(t.Context(), "c2"); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), disk) {
		t.Errorf("the other container, meanwhile\nwant it refused, and the disk named\ngot  %v", err)
	}
	if !guard.Stop() {
		t.Error("somebody waited for the server")
	}
	release()
	if err := table.ReleaseAll(t.Context(), always); err != nil {
		t.Errorf("destroyed, when the server answers: %v", err)
	}
	if err := table.Release(t.Context(), "c2"); err != nil {
		t.Errorf("the other container, then: %v", err)
	}
}

// A destroy that fails after it has unmounted a stranger mounts it again as it was, with its
// contents, because nobody else knows how to mount it.
func TestDestroyThatFailsLatePutsStrangersBack(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "volume")
	nested := filepath.Join(place, "nested")
	mounttest.Mount(t, "later", place, "tmpfs", 0, "mode=700")
	mounttest.Mount(t, "later", nested, "tmpfs", 0, "")
	table, err := recovered(t, filepath.Join(t.TempDir(), "state.json"), fmt.Sprintf(
		`{"version":3,"boot_id":"BOOT","storages":[{"driver":"later","mount_point":%q,"holders":["c1"]},{"driver":"later","mount_point":%q,"holders":["c1"]}]}`, place, nested))
	if err == nil {
		t.Fatal("they are no strangers")
	}
	for _, file := range []string{place + "/file", nested + "/file"} {
		if err := os.WriteFile(file, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := table.ReleaseAll(t.Context(), func() bool { return false }); errkind.Of(err) != errkind.DeadlineExceeded {
			t.Fatalf("want it refused at the end\ngot  %v", err)
		}
		for _, file := range []string{place + "/file", nested + "/file"} {
			if got, err := os.ReadFile(file); err != nil || string(got) != file {
				t.Errorf("%s\nwant it there\ngot  %q, error %v", file, got, err)
			}
		}
		if left, err := remaining(t, table); err != nil || len(left) != 2 {
			t.Errorf("strangers\nwant 2\ngot  %v, error %v", left, err)
		}
	}
	if err := table.ReleaseAll(t.Context(), always); err != nil {
		t.Error(err)
	}
	for _, path := range []string{nested, place} {
		if top, err := mount.Topmost(path); top != nil || err != nil {
			t.Errorf("%s, in the end\nwant it gone\ngot  %v, error %v", path, top, err)
		}
	}
}

// A mount over another one has its own line in mountinfo, and both are unmounted in one turn.
func TestNestedStrangersAreUnmountedAndRestoredTogether(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "volume")
	for _, name := range []string{"below", "above"} {
		mounttest.Mount(t, name, place, "tmpfs", 0, "")
		if err := os.WriteFile(filepath.Join(place, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	table := besideStranger(t, place)
	table.strangers = append(table.strangers, table.strangers...)
	ctx, cancel := context.WithTimeout(t.Context(), hangs)
	defer cancel()
	if err := table.ReleaseAll(ctx, func() bool { return false }); err == nil || ctx.Err() != nil {
		t.Fatalf("want it refused at the end, at once\ngot  %v", err)
	}
	mounts, err := mount.At(place)
	if err != nil || len(mounts) != 2 || mounts[0].Source != "below" || mounts[1].Source != "above" {
		t.Fatalf("put back\nwant both, as they were\ngot  %v, error %v", mounts, err)
	}
	if _, err := os.Stat(filepath.Join(place, "above")); err != nil {
		t.Error(err)
	}
	if err := table.ReleaseAll(ctx, always); err != nil {
		t.Fatal(err)
	}
	if mounts, err := mount.At(place); err != nil || len(mounts) != 0 {
		t.Errorf("destroyed\nwant nothing there\ngot  %v, error %v", mounts, err)
	}
}

// hangs bounds a call that would otherwise wait for itself forever.
const hangs = 30 * time.Second

// The disk is checked before agreed is called, while the answer can still be an error.
func TestDiskOfAStrangerIsFreeBeforeADestroySucceeds(t *testing.T) {
	disk, place := mounttest.Attach(t, mounttest.Image(t, "xfs")), filepath.Join(mounttest.Dir(t), "volume")
	mounttest.Mount(t, disk, place, "xfs", 0, "")
	table := besideStranger(t, place)
	var free *os.File
	var inUse error
	if err := table.ReleaseAll(t.Context(), func() bool { free, inUse = claim(disk); return true }); err != nil {
		t.Fatal(err)
	}
	if inUse != nil {
		t.Fatalf("its disk\nwant it free\ngot  %v", inUse)
	}
	free.Close()
}

// The mount also exists in a mount namespace that a process in the guest has made. The stranger is
// remembered, although the agent's own list does not show the mount.
func TestStrangerThatIsMountedElsewhereStaysAStranger(t *testing.T) {
	disk, place := mounttest.Attach(t, mounttest.Image(t, "xfs")), filepath.Join(mounttest.Dir(t), "volume")
	mounttest.Mount(t, disk, place, "xfs", 0, "")
	elsewhere, err := unix.OpenTree(unix.AT_FDCWD, place, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	closeIt := sync.OnceFunc(func() { unix.Close(elsewhere) })
	defer closeIt()
	table := besideStranger(t, place)
	for range 2 {
		if err := table.ReleaseAll(t.Context(), always); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), disk) {
			t.Errorf("destroyed\nwant it refused, and the disk named\ngot  %v", err)
		}
		if err := table.Release(t.Context(), "c1"); errkind.Of(err) != errkind.FailedPrecondition {
			t.Errorf("its container\nwant it refused\ngot  %v", err)
		}
	}
	closeIt()
	if err := table.ReleaseAll(t.Context(), always); err != nil {
		t.Error(err)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}

// Another call is at the disk that a stranger was on: it mounts the disk, or proves it free. The
// end of the stranger's container waits for that call instead of finding the disk in use.
func TestDiskOfAStrangerIsClaimedByOneCallAtATime(t *testing.T) {
	disk, place := mounttest.Attach(t, mounttest.Image(t, "xfs")), filepath.Join(mounttest.Dir(t), "volume")
	device, err := blockdev.ByPath(disk)
	if err != nil {
		t.Fatal(err)
	}
	table := besideStranger(t, place)
	table.strangers[0].disks = []mount.Device{{Number: device.Number, Seq: device.Seq}} // as a destroy leaves it that has failed late
	done, err := table.devices.turns.Take(t.Context(), disk)
	if err != nil {
		t.Fatal(err)
	}
	claimed, err := claim(disk)
	if err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for name, end := range map[string]func() error{
		"its container":       func() error { return table.Release(over, "c1") },
		"the sandbox":         func() error { return table.ReleaseAll(over, always) },
		"asked for by others": func() error { return table.Hold(over, "c2", []*agentpb.Storage{inMemory(place)}, always) },
	} {
		if err := end(); errkind.Of(err) != errkind.DeadlineExceeded || !strings.Contains(err.Error(), disk) {
			t.Errorf("%s, in no time\nwant no answer, and the disk named\ngot  %v", name, err)
		}
	}
	if err := table.Release(over, "c2"); err != nil {
		t.Errorf("another container: %v", err)
	}
	outside := inMemory(filepath.Dir(place)) // it hides nothing: the stranger is not mounted
	limited, end := context.WithTimeout(t.Context(), hangs)
	defer end()
	if err := table.Hold(limited, "c2", []*agentpb.Storage{outside}, always); err != nil {
		t.Errorf("a storage around it: %v", err)
	}
	if err := table.Release(t.Context(), "c2"); err != nil {
		t.Error(err)
	}
	ended := make(chan error, 2)
	for range cap(ended) {
		go func() { ended <- table.Release(t.Context(), "c1") }()
	}
	claimed.Close()
	done()
	for range cap(ended) {
		if err := <-ended; err != nil {
			t.Errorf("its container, when that call has ended: %v", err)
		}
	}
}

func TestStrangerThatIsPutBackKeepsWhatIsRemembered(t *testing.T) {
	disk, place := mounttest.Attach(t, mounttest.Image(t, "xfs")), filepath.Join(mounttest.Dir(t), "volume")
	mounttest.Mount(t, disk, place, "xfs", 0, "")
	table := besideStranger(t, place)
	if err := table.volumes.Observe(place); err != nil {
		t.Fatal(err)
	}
	table.volumes.Remember(place, health.Past{Unreadable: 3, LastRead: "x"})
	all, err := table.leavers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	leaving := table.leave(t.Context(), all)
	if err := leaving.await(t.Context()); err != nil {
		t.Fatal(err)
	}
	leaving.decide(false)
	if past := table.volumes.Past(place, mount.Identity{}); past.Unreadable != 3 {
		t.Errorf("reads that failed\nwant 3\ngot  %d", past.Unreadable)
	}
	if err := table.ReleaseAll(t.Context(), always); err != nil {
		t.Error(err)
	}
}
