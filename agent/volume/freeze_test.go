package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
	"github.com/directvol/directvol/agent/state"
)

// held is a lease whose volumes are frozen.
type held struct {
	name    string
	volumes []FrozenVolume
	cancel  context.CancelFunc
	ended   chan error // of Freeze
}

// freeze starts a lease and returns when its volumes are frozen.
func freeze(t *testing.T, table *Table, length time.Duration, paths ...string) *held {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	h, frozen := &held{cancel: cancel, ended: make(chan error, 1)}, make(chan struct{})
	go func() {
		h.ended <- table.Freeze(ctx, paths, length, func(name string, volumes []FrozenVolume) error {
			h.name, h.volumes = name, volumes
			close(frozen)
			return nil
		})
	}()
	select {
	case <-frozen:
	case err := <-h.ended:
		t.Fatalf("freeze %v: %v", paths, err)
	}
	return h
}

// wantFrozen checks with the kernel whether the filesystem at dir is frozen.
func wantFrozen(t *testing.T, dir string, want bool) {
	t.Helper()
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	err = filesystem.Freeze(root)
	if err == nil {
		err = filesystem.Thaw(root)
	}
	if frozen := errors.Is(err, filesystem.ErrFrozen); frozen != want || err != nil && !frozen {
		t.Errorf("%s is frozen\nwant %v\ngot  %v (%v)", dir, want, frozen, err)
	}
}

// freezable mounts a new filesystem that the test may freeze.
func freezable(t *testing.T, fstype, dir string) string {
	t.Helper()
	mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, fstype)), dir, fstype, 0, "")
	mounttest.Freezable(t, dir)
	return dir
}

func TestFilesystemIsFrozenUntilItIsThawed(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			table, dir := newTable(), freezable(t, fstype, mounttest.Dir(t))
			if err := os.WriteFile(filepath.Join(dir, "before"), []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			h := freeze(t, table, maxLease, dir)
			if want := (FrozenVolume{dir, Frozen}); len(h.volumes) != 1 || h.volumes[0] != want {
				t.Errorf("\nwant %v\ngot  %v", want, h.volumes)
			}
			wantFrozen(t, dir, true)
			wrote := make(chan error, 1)
			go func() { wrote <- os.WriteFile(filepath.Join(dir, "meanwhile"), []byte("y"), 0o600) }()
			if r, err := table.Report(t.Context(), dir); err != nil || !r.Frozen {
				t.Errorf("want a report of a frozen volume\ngot  %+v, error %v", r, err)
			}
			if text, err := os.ReadFile(filepath.Join(dir, "before")); err != nil || string(text) != "x" {
				t.Errorf("read while frozen: %q, error %v", text, err)
			}
			if err := table.Thaw(t.Context(), h.name); err != nil {
				t.Fatal(err) // thaws it, too
			}
			if err := <-h.ended; err != nil {
				t.Errorf("want the lease to end without an error\ngot  %v", err)
			}
			if err := <-wrote; err != nil {
				t.Errorf("the writer goes on: %v", err)
			}
			wantFrozen(t, dir, false)
			if r, err := table.Report(t.Context(), dir); err != nil || r.Frozen {
				t.Errorf("want a report of a volume that is not frozen\ngot  %+v, error %v", r, err)
			}
			if err := table.Thaw(t.Context(), h.name); errkind.Of(err) != errkind.NotFound {
				t.Errorf("thawed twice\nwant NotFound\ngot  %v", err)
			}
		})
	}
}

func TestLeaseEndsInEveryWay(t *testing.T) {
	errSend := errors.New("the caller reads nothing")
	dir := freezable(t, "ext4", mounttest.Dir(t))
	for name, way := range map[string]struct {
		length time.Duration
		send   error
		end    func(*Table, context.CancelFunc) error
		want   error // or of the kind Aborted
	}{
		"its time is over":                      {length: minLease},
		"its caller has gone":                   {end: func(_ *Table, cancel context.CancelFunc) error { cancel(); return nil }, want: context.Canceled},
		"its caller is silent":                  {send: errSend, want: errSend},
		"the agent ends":                        {end: func(table *Table, _ context.CancelFunc) error { table.EndLeases(); return nil }},
		"it is to be flushed before an unmount": {end: func(table *Table, _ context.CancelFunc) error { return table.Unfreeze(context.Background(), dir) }},
		"it is to be unmounted": {end: func(table *Table, _ context.CancelFunc) error {
			return table.Quiet(context.Background(), dir, func() (bool, error) {
				if r, err := table.Report(t.Context(), dir); err != nil || r.Frozen {
					return false, fmt.Errorf("unmounted while frozen, or %w", err)
				}
				return false, nil
			})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			table, length := newTable(), way.length
			if length == 0 {
				length = maxLease
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var lease string
			err := table.Freeze(ctx, []string{dir}, length, func(name string, _ []FrozenVolume) error {
				lease = name
				if way.end == nil {
					return way.send
				}
				return way.end(table, cancel)
			})
			if way.want != nil && !errors.Is(err, way.want) || way.want == nil && errkind.Of(err) != errkind.Aborted {
				t.Errorf("\nwant %v, or Aborted if that is nil\ngot  %v", way.want, err)
			}
			wantFrozen(t, dir, false)
			if err := table.Thaw(t.Context(), lease); errkind.Of(err) != errkind.NotFound {
				t.Errorf("thawed after its end\nwant NotFound\ngot  %v", err)
			}
			if err := table.SyncOne(t.Context(), dir); err != nil {
				t.Errorf("the volume is not free again: %v", err)
			}
		})
	}
}

func TestAllVolumesAreFrozenOrNone(t *testing.T) {
	own := mounttest.Dir(t)
	one, foreign, bound, memory := filepath.Join(own, "one"), filepath.Join(own, "zfs"), filepath.Join(own, "bound"), filepath.Join(own, "memory")
	agents := freezable(t, "ext4", filepath.Join(own, "agents"))
	freezable(t, "ext4", one)
	freezable(t, "ext4", foreign)
	mounttest.Mount(t, one, bound, "", unix.MS_BIND, "")
	mounttest.Mount(t, "memory", memory, "tmpfs", 0, "")
	table := newTable()
	leases, err := state.Open(filepath.Join(agents, "leases"))
	if err != nil {
		t.Fatal(err)
	}
	defer leases.Close()
	if err := table.KeepLeases(leases); err != nil {
		t.Fatal(err)
	}
	root, err := os.Open(foreign)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := filesystem.Freeze(root); err != nil {
		t.Fatal(err)
	}
	// In a chroot the root is no mount point; there it is refused as a path that is no volume.
	rootKind, rootNames := errkind.FailedPrecondition, "the agent itself"
	if at, err := mount.Topmost("/"); err != nil {
		t.Fatal(err)
	} else if at == nil {
		rootKind, rootNames = errkind.InvalidArgument, "not a mount point"
	}
	for name, c := range map[string]struct {
		paths  []string
		length time.Duration
		kind   errkind.Kind
		names  string
	}{
		"beside another program's freeze": {[]string{one, foreign}, maxLease, errkind.FailedPrecondition, foreign},
		"no mount":                        {[]string{one, own}, maxLease, errkind.InvalidArgument, own},
		"no path":                         {[]string{one, own + "/none"}, maxLease, errkind.NotFound, own + "/none"},
		"the agent's root":                {[]string{one, "/"}, maxLease, rootKind, rootNames},
		"the agent's state":               {[]string{one, agents}, maxLease, errkind.FailedPrecondition, "the agent itself"},
		"twice":                           {[]string{one, one + "/"}, maxLease, errkind.InvalidArgument, one},
		"twice by two mounts":             {[]string{one, bound}, maxLease, errkind.InvalidArgument, bound},
		"nothing":                         {nil, maxLease, errkind.InvalidArgument, "1 to 64"},
		"too many":                        {make([]string, maxFrozen+1), maxLease, errkind.InvalidArgument, "1 to 64"},
		"too short":                       {[]string{one}, minLease - 1, errkind.InvalidArgument, "1ms"},
		"too long":                        {[]string{one}, maxLease + 1, errkind.InvalidArgument, "10m"},
	} {
		err := table.Freeze(t.Context(), c.paths, c.length, func(string, []FrozenVolume) error { return errors.New("frozen") })
		if err == nil || errkind.Of(err) != c.kind || !strings.Contains(err.Error(), c.names) {
			t.Errorf("%s\nwant kind %v and %s\ngot  %v", name, c.kind, c.names, err)
		}
		wantFrozen(t, one, false)
	}
	wantFrozen(t, foreign, true)
	if err := filesystem.Thaw(root); err != nil {
		t.Error(err)
	}
	h := freeze(t, table, maxLease, memory, one, foreign)
	got := map[string]Consistency{}
	for _, v := range h.volumes {
		got[v.Path] = v.Consistency
	}
	if got[one] != Frozen || got[foreign] != Frozen || got[memory] != Synced {
		t.Errorf("want all frozen, and the tmpfs synced\ngot  %v", h.volumes)
	}
	if err := table.Thaw(t.Context(), h.name); err != nil {
		t.Error(err)
	}
}

// A volume whose disk is a file of another volume is frozen before it, whatever their names: its
// FIFREEZE writes to the file.
func TestVolumeWithinAnotherIsFrozenFirst(t *testing.T) {
	own := mounttest.Dir(t)
	for _, names := range [][2]string{{"a", "b"}, {"d", "c"}} {
		outer, inner := freezable(t, "ext4", filepath.Join(own, names[0])), filepath.Join(own, names[1])
		image := filepath.Join(outer, "image")
		if err := os.WriteFile(image, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(image, 64<<20); err != nil {
			t.Fatal(err)
		}
		mounttest.Format(t, "ext4", image)
		mountAt(t, mounttest.Attach(t, image), inner)
		mounttest.Freezable(t, inner)
		if err := os.WriteFile(filepath.Join(inner, "file"), make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		table := newTable()
		h := freeze(t, table, maxLease, outer, inner)
		wantFrozen(t, inner, true)
		wantFrozen(t, outer, true)
		if err := table.Thaw(t.Context(), h.name); err != nil {
			t.Error(err)
		}
		later := filepath.Join(own, names[0]+"-later")
		mounttest.Mount(t, outer, later, "", unix.MS_BIND, "")
		h = freeze(t, table, maxLease, later, inner)
		if err := table.Thaw(t.Context(), h.name); err != nil {
			t.Error(err)
		}
	}
}

// The bound mount of the filesystem is frozen with it.
func TestFrozenVolumeAnswersAndRefuses(t *testing.T) {
	own := mounttest.Dir(t)
	dir, bound := filepath.Join(own, "dir"), filepath.Join(own, "bound")
	freezable(t, "ext4", dir)
	mounttest.Mount(t, dir, bound, "", unix.MS_BIND, "")
	table := newTable()
	if err := table.Observe(bound); err != nil {
		t.Fatal(err)
	}
	events := watched(t, table, own)
	for e := range events {
		if e.Type == Resynced {
			break
		}
	}
	h := freeze(t, table, maxLease, dir)
	for _, path := range []string{dir, bound} {
		if stats, err := table.Stats(t.Context(), path); err != nil || len(stats.Conditions) > 0 {
			t.Errorf("stats of %s: %v, error %v", path, stats, err)
		}
		if err := table.SyncOne(t.Context(), path); err != nil {
			t.Errorf("sync %s: %v", path, err)
		}
		if err := table.Flush(t.Context(), path); err != nil {
			t.Errorf("flush %s: %v", path, err)
		}
		if err := table.Resize(t.Context(), path, 0, 0); errkind.Of(err) != errkind.FailedPrecondition || !errors.Is(err, errFrozen) {
			t.Errorf("resize %s\nwant it refused as frozen\ngot  %v", path, err)
		}
		if table.ResizeAtOnce(t.Context(), path, 0) {
			t.Errorf("%s has grown while frozen", path)
		}
		if _, err := table.Trim(t.Context(), path, 0); errkind.Of(err) != errkind.FailedPrecondition || !errors.Is(err, errFrozen) {
			t.Errorf("trim %s\nwant it refused as frozen\ngot  %v", path, err)
		}
		err := table.Freeze(t.Context(), []string{path}, maxLease, func(string, []FrozenVolume) error { return errors.New("frozen") })
		if errkind.Of(err) != errkind.FailedPrecondition || !errors.Is(err, errFrozen) {
			t.Errorf("freeze %s again\nwant it refused as frozen\ngot  %v", path, err)
		}
	}
	wantFrozen(t, dir, true)
	h.cancel()
	<-h.ended
	await := map[string]bool{dir: true, bound: true} // by path, the next value of Frozen
	for len(await) > 0 {
		e := <-events
		if want, ok := await[e.Report.Path]; !ok || want != e.Report.Frozen {
			continue
		}
		if await[e.Report.Path] = false; !e.Report.Frozen {
			delete(await, e.Report.Path)
		}
	}
}

func TestNextAgentThawsWhatItFinds(t *testing.T) {
	own := mounttest.Dir(t)
	dir, other := filepath.Join(own, "dir"), filepath.Join(own, "other")
	freezable(t, "ext4", dir)
	freezable(t, "ext4", other)
	open := func(path string) *state.File {
		file, err := state.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { file.Close() })
		return file
	}
	table, path := newTable(), filepath.Join(t.TempDir(), "leases")
	if err := table.KeepLeases(open(path)); err != nil {
		t.Fatal(err)
	}
	h := freeze(t, table, maxLease, dir)
	text, err := os.ReadFile(path) // as a SIGKILL leaves it
	if err != nil {
		t.Fatal(err)
	}
	left := path + "-left"
	if err := os.WriteFile(left, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := newTable().KeepLeases(open(left)); err != nil {
		t.Error(err)
	}
	wantFrozen(t, dir, false)
	if text, err := os.ReadFile(left); err != nil || strings.Contains(string(text), dir) {
		t.Errorf("want no volume in the next agent's file\ngot  %s, error %v", text, err)
	}
	if err := table.Thaw(t.Context(), h.name); errkind.Of(err) != errkind.Aborted || !strings.Contains(err.Error(), dir) {
		t.Errorf("thawed by another program meanwhile\nwant Aborted and the volume\ngot  %v", err)
	}
	if err := <-h.ended; errkind.Of(err) != errkind.Aborted {
		t.Errorf("the stream\nwant Aborted\ngot  %v", err)
	}
	if text, err := os.ReadFile(path); err != nil || strings.Contains(string(text), dir) {
		t.Errorf("want no volume in the file after the lease\ngot  %s, error %v", text, err)
	}
}

func TestLeasesThatAreNotUnderstoodAreReported(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases")
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := state.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := newTable().KeepLeases(file); err == nil || !strings.Contains(err.Error(), path+".bad") {
		t.Errorf("want an error that names the copy\ngot  %v", err)
	}
}

func TestSyncReportsThatNothingIsMounted(t *testing.T) {
	dir := t.TempDir()
	for path, want := range map[string]errkind.Kind{dir: errkind.InvalidArgument, dir + "/none": errkind.NotFound, "x": errkind.InvalidArgument} {
		if err := newTable().SyncOne(t.Context(), path); errkind.Of(err) != want || err == nil {
			t.Errorf("%s\nwant kind %v\ngot  %v", path, want, err)
		}
	}
}

// An ext4 that has shut down (EXT4_IOC_SHUTDOWN) writes nothing any more. Flush does not return its
// error.
func TestSyncReturnsTheFilesystemsError(t *testing.T) {
	dir := freezable(t, "ext4", mounttest.Dir(t))
	table := newTable()
	if err := table.SyncOne(t.Context(), dir); err != nil {
		t.Error(err)
	}
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	const shutdown, withoutLog = 0x8004587d, 2 // _IOR('X', 125, __u32)
	if err := unix.IoctlSetPointerInt(int(root.Fd()), shutdown, withoutLog); err != nil {
		t.Fatal(err)
	}
	if err := table.SyncOne(t.Context(), dir); errkind.Of(err) != errkind.Internal || !errors.Is(err, unix.EIO) {
		t.Errorf("want EIO\ngot  %v", err)
	}
	if err := table.Flush(t.Context(), dir); err != nil {
		t.Errorf("a flush: %v", err)
	}
	err = table.Freeze(t.Context(), []string{dir}, maxLease, func(string, []FrozenVolume) error { return nil })
	if err == nil {
		t.Error("a filesystem that has shut down was frozen")
	}
}

// A tmpfs cannot be frozen: during a lease all of its mounts may be used, and unmounted.
func TestLeaseLeavesAllMountsOfWhatItCannotFreeze(t *testing.T) {
	own := mounttest.Dir(t)
	memory, bound := filepath.Join(own, "memory"), filepath.Join(own, "bound")
	mounttest.Mount(t, "memory", memory, "tmpfs", 0, "")
	mounttest.Mount(t, memory, bound, "", unix.MS_BIND, "")
	table := newTable()
	if err := table.Observe(bound); err != nil {
		t.Fatal(err)
	}
	h := freeze(t, table, maxLease, memory)
	for _, path := range []string{memory, bound} {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		if err := table.Quiet(ctx, path, func() (bool, error) { return false, nil }); err != nil {
			t.Errorf("unmount %s: %v", path, err)
		}
		cancel()
	}
	if err := table.Thaw(t.Context(), h.name); err != nil {
		t.Error(err)
	}
}

// A filesystem that is mounted once more during its lease is frozen there, too.
func TestMountMadeDuringALeaseIsFrozen(t *testing.T) {
	own := mounttest.Dir(t)
	dir, other := filepath.Join(own, "dir"), filepath.Join(own, "other")
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	mounttest.Freezable(t, dir)
	table := newTable()
	h := freeze(t, table, maxLease, dir)
	mounttest.Mount(t, disk, other, "xfs", 0, "")
	top, err := mount.Topmost(other)
	if err != nil {
		t.Fatal(err)
	}
	if err := table.Own(other, mount.Identify(top), health.Past{}); err != nil {
		t.Fatal(err)
	}
	defer table.Forget(other)
	v := table.at(other)
	if stats, err := table.Stats(t.Context(), other); err != nil || len(stats.Conditions) > 0 || !v.Report().Frozen {
		t.Errorf("want it frozen, without a condition\ngot  %v, error %v, %+v", stats, err, v.Report())
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := table.Resize(ctx, other, 0, 0); !errors.Is(err, errFrozen) {
		t.Errorf("resize\nwant it refused as frozen\ngot  %v", err)
	}
	if err := table.Thaw(t.Context(), h.name); err != nil {
		t.Error(err)
	}
	if err := table.Resize(ctx, other, 0, 0); err != nil || v.Report().Frozen {
		t.Errorf("thawed\nwant it free\ngot  %v, %+v", err, v.Report())
	}
}
