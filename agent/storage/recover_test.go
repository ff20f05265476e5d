package storage

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
	"github.com/directvol/directvol/agent/state"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/agentpb"
)

// stateful returns a table with a state file at path, like that of a new agent.
func stateful(t *testing.T, path string) *Table {
	t.Helper()
	table := newTable()
	var err error
	if table.state, err = state.Open(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { table.state.Close() })
	return table
}

// restarted returns the table of the next agent after the agent of table has ended.
func restarted(t *testing.T, table *Table) *Table {
	t.Helper()
	if err := table.state.Close(); err != nil {
		t.Fatal(err)
	}
	next := stateful(t, table.state.Path())
	if err := next.Recover(); err != nil {
		t.Fatal(err)
	}
	return next
}

func localStorage(mountPoint string) []*agentpb.Storage {
	return []*agentpb.Storage{{Driver: "local", Source: "local", MountPoint: mountPoint}}
}

func there(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestHoldersSurviveARestart(t *testing.T) {
	dir := ownDir(t)
	path, state := filepath.Join(dir, "volume"), filepath.Join(dir, "run", "state.json")
	table := stateful(t, state)
	for _, holder := range []string{"c1", "c2"} {
		if err := table.Hold(t.Context(), holder, localStorage(path), always); err != nil {
			t.Fatal(err)
		}
	}
	for _, step := range []struct {
		release string
		stays   bool
	}{{"c1", true}, {"c1", true}, {"c2", false}} {
		table = restarted(t, table)
		if err := table.Release(t.Context(), step.release); err != nil {
			t.Fatal(err)
		}
		if there(path) != step.stays {
			t.Errorf("after %s has released it\nwant it mounted: %v\ngot  %v", step.release, step.stays, !step.stays)
		}
	}
	if left := restarted(t, table).Mounted(); len(left) != 0 {
		t.Errorf("want nothing\ngot  %v", left)
	}
}

// saved returns what the state file holds of the storages.
func saved(t *testing.T, table *Table) []record {
	t.Helper()
	var now snapshot
	text, err := os.ReadFile(table.state.Path())
	if err == nil {
		err = json.Unmarshal(text, &now)
	}
	if err != nil {
		t.Fatal(err)
	}
	return now.Storages
}

// Somebody mounts something over a storage, and asks for statistics of it. The state file keeps
// what is remembered of the storage, because its watch goes on, also that of the next agent.
func TestPastOfAStorageThatIsCoveredIsSaved(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "place")
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	table := stateful(t, filepath.Join(t.TempDir(), "state.json"))
	if err := hold(t, table, onDisk(disk, "xfs", place)); err != nil {
		t.Fatal(err)
	}
	table.volumes.Remember(place, health.Past{Unreadable: 2, LastRead: "x"})
	mounttest.Mount(t, "cover", place, "tmpfs", 0, "")
	if err := errors.Join(table.volumes.Observe(place), table.save()); err != nil {
		t.Fatal(err)
	}
	for _, when := range []string{"covered", "after a restart", "after another restart"} {
		if all := saved(t, table); len(all) != 1 || all[0].Past.Unreadable != 2 {
			t.Errorf("%s\nwant 2 failed reads\ngot  %+v", when, all)
		}
		table = restarted(t, table)
	}
	mounttest.Unmount(t, place)
	if err := hold(t, table, onDisk(disk, "xfs", place)); err != nil {
		t.Error(err)
	}
	v, err := table.volumes.(*volume.Table).Lookup(place)
	if err != nil {
		t.Fatal(err)
	}
	if past := table.volumes.Past(place, mount.Identity{}); !v.Owned() || past.Unreadable != 2 {
		t.Errorf("in sight again\nwant it owned, with 2 failed reads\ngot  owned %v, %+v", v.Owned(), past)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}

func TestDestroyedSandboxStaysDestroyed(t *testing.T) {
	dir := ownDir(t)
	table := stateful(t, filepath.Join(dir, "state.json"))
	if err := table.ReleaseAll(t.Context(), always); err != nil {
		t.Fatal(err)
	}
	table = restarted(t, table)
	if err := table.Hold(t.Context(), "c1", localStorage(filepath.Join(dir, "volume")), always); err == nil || !strings.Contains(err.Error(), "destroyed") {
		t.Errorf("want it refused\ngot  %v", err)
	}
	if err := table.End(false); err != nil {
		t.Fatal(err)
	}
	if err := restarted(t, table).Hold(t.Context(), "c1", localStorage(filepath.Join(dir, "volume")), always); err != nil {
		t.Error(err)
	}
}

// A killed agent leaves a record of the storage that it was about to mount, and perhaps its mount
// point.
func TestMissingStorageIsRemovedFromTheState(t *testing.T) {
	dir := ownDir(t)
	state, path := filepath.Join(dir, "state.json"), filepath.Join(dir, "volume")
	table := stateful(t, state)
	m := &mounted{
		request: request{driver: ephemeral, source: "tmpfs", fstype: "tmpfs", mountPoint: path},
		from:    origin{path: "tmpfs"}, holders: map[string]bool{"c1": true},
	}
	if err := errors.Join(table.recordMounting(m), os.Mkdir(path, 0o700)); err != nil {
		t.Fatal(err)
	}
	if left := restarted(t, table).Mounted(); len(left) != 0 || there(path) {
		t.Errorf("want nothing, and no mount point\ngot  %v, mount point %v", left, there(path))
	}
	if text, err := os.ReadFile(state); err != nil || strings.Contains(string(text), path) {
		t.Errorf("want it struck out\ngot  %s, error %v", text, err)
	}
}

func TestStorageThatCannotBeSavedIsNotMounted(t *testing.T) {
	dir := ownDir(t)
	state, path := filepath.Join(dir, "state.json"), filepath.Join(dir, "volume")
	table := stateful(t, state)
	if err := os.MkdirAll(state+".new/full", 0o700); err != nil { // no file can replace the directory
		t.Fatal(err)
	}
	err := table.Hold(t.Context(), "c1", localStorage(path), always)
	if err == nil || !strings.Contains(err.Error(), state) || there(path) || len(table.Mounted()) != 0 {
		t.Errorf("want %s named and nothing there\ngot  %v, mount point %v", state, err, there(path))
	}
}

func TestStateOfAnotherBootIsIgnored(t *testing.T) {
	dir := ownDir(t)
	path, file := filepath.Join(dir, "volume"), filepath.Join(dir, "state.json")
	table := stateful(t, file)
	if err := table.Hold(t.Context(), "c1", localStorage(path), always); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, bytes.ReplaceAll(text, []byte(table.state.Header(0).Boot), []byte("another")), 0o600); err != nil {
		t.Fatal(err)
	}
	if left := restarted(t, table).Mounted(); len(left) != 0 || !there(path) {
		t.Errorf("want nothing taken over, and nothing removed\ngot  %v, mount point %v", left, there(path))
	}
}

func TestInvalidStateIsKeptAside(t *testing.T) {
	for name, text := range map[string]string{
		"empty": "", "text": "state", "cut": `{"version":1,"storages":[{"dri`, "newer": `{"version":2}`, "without a boot": `{"version":1}`, "another type": `{"version":1,"storages":7}`,
		"long": `{"version":1}` + strings.Repeat(" ", 16<<20),
	} {
		state := filepath.Join(ownDir(t), "state.json")
		if err := os.WriteFile(state, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		table := stateful(t, state)
		if err := table.Recover(); err == nil || !strings.Contains(err.Error(), state+".bad") {
			t.Errorf("%s: want an error that says so\ngot  %v", name, err)
		}
		if kept, err := os.ReadFile(state + ".bad"); err != nil || string(kept) != text {
			t.Errorf("%s: not kept: %v", name, err)
		}
		if err := table.Hold(t.Context(), "c1", localStorage(filepath.Join(filepath.Dir(state), "v")), always); err != nil {
			t.Errorf("%s: nothing can be held: %v", name, err)
		}
		// After another restart with another invalid state, the first copy stays.
		if err := table.state.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(state, []byte("written over it"), 0o600); err != nil {
			t.Fatal(err)
		}
		_ = stateful(t, state).Recover() // fails in the same way again
		if kept, err := os.ReadFile(state + ".bad"); err != nil || string(kept) != text {
			t.Errorf("%s: after another restart\nwant %.40q kept\ngot  %.40q, error %v", name, text, kept, err)
		}
	}
}

func TestPanicInATurnEndsItsCallAlone(t *testing.T) {
	table := newTable()
	for range 2 { // the turn is free again
		func() {
			defer func() { _ = recover() }()
			_ = table.inTurn(t.Context(), "mount", "/volume", func() error { panic("a bug") })
			t.Error("the panic was swallowed")
		}()
	}
}

func TestInvalidRecordIsLeftOut(t *testing.T) {
	good := record{Driver: "local", MountPoint: "/tmp", Holders: []string{"c1"}}
	if _, err := good.mounted(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*record){
		"no driver":    func(r *record) { r.Driver = "" },
		"the root":     func(r *record) { r.MountPoint = "/" },
		"relative":     func(r *record) { r.MountPoint = "tmp" },
		"unclean":      func(r *record) { r.MountPoint = "/tmp/../etc" },
		"no holder":    func(r *record) { r.Holders = nil },
		"wrong option": func(r *record) { r.Data = "size=1" },
	} {
		r := good
		change(&r)
		if _, err := r.mounted(); err == nil {
			t.Errorf("%s: taken over", name)
		}
	}
}

func FuzzState(f *testing.F) {
	f.Add([]byte(`{"version":1,"boot_id":"b","storages":[{"driver":"blk","source":"02/01","fstype":"xfs","flags":1,"mount_point":"/run/v","device":"/dev/vda","number":64768,"made":true,"holders":["","c1"],"mount_id":7,"past":{"failed":"2026-01-02T03:04:05Z","unreadable":2,"last_read":"x"}}]}`))
	f.Add([]byte(`{"version":2,"boot_id":"b","storages":[{"driver":"blk","source":"02/01","fstype":"ext4","mount_point":"/run/v","device":"/dev/vda","number":64768,"holders":["c1"],"mount":{"unique":2147483720,"super":24538,"id":42,"fstype":"ext4","root":"/","uuid":"u","number":64768,"devices":[{"number":64768,"diskseq":581}]}}]}`))
	f.Add([]byte(`{"version":1,"boot_id":"b","sandbox_destroyed":true,"storages":[{"driver":"local","mount_point":"/v","data":"mode=0777","holders":["c1","c1"]}]}`))
	f.Add([]byte(`{"version":1,"boot_id":"other"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var was snapshot
		if json.Unmarshal(text, &was) != nil {
			return
		}
		for _, r := range was.Storages {
			m, err := r.mounted()
			if err != nil {
				continue
			}
			if !mount.IsPoint(m.mountPoint) || len(m.holders) == 0 {
				t.Fatalf("taken over: %+v", m)
			}
			written, err := json.Marshal(snapshot{Storages: []record{recordOf(m, r.Past)}})
			if err != nil {
				t.Fatal(err)
			}
			var again snapshot
			if err := json.Unmarshal(written, &again); err != nil || len(again.Storages) != 1 {
				t.Fatalf("%s: %v", written, err)
			}
			if n, err := again.Storages[0].mounted(); err != nil || n.mountPoint != m.mountPoint || !reflect.DeepEqual(n.holders, m.holders) {
				t.Fatalf("\nwant %+v\ngot  %+v, error %v", m, n, err)
			}
		}
	})
}
