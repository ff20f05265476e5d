package volume

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// followed returns a table that follows this process's mounts.
func followed(t *testing.T) *Table {
	t.Helper()
	table := newTable()
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer close(ended)
		_ = table.FollowMounts(ctx)
	}()
	t.Cleanup(func() { cancel(); <-ended })
	mounttest.Await(t, "the mounts to be followed", func() bool { return table.changes.Now() > 0 })
	return table
}

// watched starts a Watch and returns its events about volumes below a directory, and all events
// without a volume.
func watched(t *testing.T, table *Table, below string) <-chan Event {
	t.Helper()
	events := make(chan Event, 1024)
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		ended <- table.Watch(ctx, func(e Event) error {
			if e.Report.Path == "" || strings.HasPrefix(e.Report.Path, below+"/") {
				events <- e
			}
			return nil
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) && errkind.Of(err) != errkind.DeadlineExceeded {
			t.Errorf("Watch: %v", err)
		}
	})
	return events
}

func wantEvent(t *testing.T, events <-chan Event, kind EventType, path string) Event {
	t.Helper()
	for {
		select {
		case e := <-events:
			if e.Type == Changed && kind != Changed {
				continue // the first look at a volume, at any time
			}
			if e.Type != kind || e.Report.Path != path {
				t.Fatalf("want %v of %q\ngot  %v of %q", kind, path, e.Type, e.Report.Path)
			}
			return e
		case <-t.Context().Done():
			t.Fatal("no event")
		}
	}
}

func TestWatchSendsWhatIsMountedAndWhatChanges(t *testing.T) {
	table, own := followed(t), mounttest.Dir(t)
	one, other := filepath.Join(own, "one"), filepath.Join(own, "other")
	disk := mounttest.Attach(t, mounttest.Image(t, "ext4"))
	mountAt(t, disk, one)
	events := watched(t, table, own)
	added := wantEvent(t, events, Added, one).Report
	wantEvent(t, events, Resynced, "")
	if added.FSType != "ext4" || !slices.Equal(added.Devices, []string{disk}) || added.DeviceBytes == 0 || added.Owned || added.ReadOnly {
		t.Errorf("it reports %+v", added)
	}
	mountAt(t, mounttest.Attach(t, mounttest.Image(t, "ext4")), other)
	wantEvent(t, events, Added, other)
	mounttest.Unmount(t, one)
	wantEvent(t, events, Removed, one)
	mountAt(t, disk, one)
	wantEvent(t, events, Added, one)
}

func mountAt(t *testing.T, disk, dir string) {
	t.Helper()
	mounttest.Run(t, "mkdir", "-p", dir)
	mounttest.Mount(t, disk, dir, "ext4", 0, "")
}

// A volume's first examination finds its filesystem's end. Later the host makes its disk larger.
func TestWatchSendsSizes(t *testing.T) {
	table, own := followed(t), mounttest.Dir(t)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- table.monitor.Sizes(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	image, dir := mounttest.Image(t, "ext4"), filepath.Join(own, "volume")
	disk := mounttest.Attach(t, image)
	mountAt(t, disk, dir)
	events := watched(t, table, own)
	await := func(is func(Report) bool) Report {
		for e := range events {
			if e.Report.Path == dir && is(e.Report) {
				return e.Report
			}
		}
		return Report{}
	}
	size := await(func(r Report) bool { return r.FilesystemBytes != 0 && r.FilesystemBytes == r.DeviceBytes }).DeviceBytes
	const more = 1 << 20
	mounttest.SetSize(t, disk, image, int64(size+more))
	await(func(r Report) bool { return r.DeviceBytes == size+more })
}

// A condition that comes and goes makes two events, however fast.
func TestWatchSendsEachCondition(t *testing.T) {
	table := newTable()
	v := &Volume{Mountpoint: "/volume", FSType: "ext4", watchers: &table.watchers}
	one, leave := table.watchers.join("")
	defer leave()
	for range 3 {
		table.watchers.changed(v)
	}
	if events, lost := table.watchers.take(one); len(events) != 3 || lost {
		t.Errorf("want three events\ngot  %d, lost %v", len(events), lost)
	}
}

// The disk of a volume that another one covers may hang, and a lease of it may end. That is no news
// of the volume in sight at its path.
func TestWatchSendsNothingOfACoveredVolume(t *testing.T) {
	table, dir := newTable(), mounttest.Dir(t)
	mountAt(t, mounttest.Attach(t, mounttest.Image(t, "ext4")), dir)
	below, err := table.Lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer table.Forget(dir)
	mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, "xfs")), dir, "xfs", 0, "")
	if _, err := table.List(t.Context()); err != nil {
		t.Fatal(err)
	}
	one, leave := table.watchers.join("")
	defer leave()
	table.watchers.changed(below)
	events, _ := table.watchers.take(one)
	for _, e := range events {
		if e.Report.Path == dir && slices.Equal(e.Report.Devices, []string{below.Device.Path}) {
			t.Errorf("want no event of %s\ngot  %+v", below.Device.Path, e)
		}
	}
}

// A watcher that does not read loses its events, and gets a Resync event.
func TestSlowWatcherIsResynced(t *testing.T) {
	table := newTable()
	v := &Volume{Mountpoint: "/volume", FSType: "ext4", watchers: &table.watchers}
	var got []EventType
	ctx, cancel := context.WithCancel(t.Context())
	err := table.Watch(ctx, func(e Event) error {
		if e.Report.Path != "" {
			return nil // of this host
		}
		got = append(got, e.Type)
		switch len(got) {
		case 1:
			for range maxEvents + 1 {
				table.watchers.changed(v)
			}
		case 3:
			cancel()
		}
		return nil
	})
	if want := []EventType{Resynced, Resync, Resynced}; !slices.Equal(got, want) || !errors.Is(err, context.Canceled) {
		t.Errorf("want %v\ngot  %v, error %v", want, got, err)
	}
}

// Events from before a list, those that a later one has overtaken, and those without a change are
// no news.
func TestSenderSendsOnlyNews(t *testing.T) {
	var sent []string
	s := sender{sent: map[string]Report{}, send: func(e Event) error {
		sent = append(sent, fmt.Sprint(e.Type, e.Report.number))
		return nil
	}}
	for _, e := range []Event{
		{Changed, Report{Path: "/a", number: 1}}, // its Added event comes later
		{Added, Report{Path: "/a", number: 3}},
		{Added, Report{Path: "/a", number: 2}},
		{Changed, Report{Path: "/a", number: 3}},
		{Added, Report{Path: "/a", DeviceBytes: 1, number: 4}},
		{Changed, Report{Path: "/a", DeviceBytes: 1, number: 5}},
		{Changed, Report{Path: "/a", DeviceBytes: 1, Growth: &Progress{Now: 1}, number: 6}},
		{Changed, Report{Path: "/a", DeviceBytes: 1, Growth: &Progress{Now: 1}, number: 7}},
		{Added, Report{Path: "/a", DeviceBytes: 2, number: 6}}, // overtaken by one that was not sent
		{Removed, Report{Path: "/a", number: 8}},
		{Removed, Report{Path: "/a", number: 9}},
		{Changed, Report{Path: "/a", number: 10}},
	} {
		if err := s.event(e); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{fmt.Sprint(Added, 3), fmt.Sprint(Changed, 4), fmt.Sprint(Changed, 6), fmt.Sprint(Removed, 8)}
	if !slices.Equal(sent, want) {
		t.Errorf("want %v\ngot  %v", want, sent)
	}
}

// A growth is reported step by step, also to a caller that finds another one's growth.
func TestGrowReportsEachStep(t *testing.T) {
	table := newTable()
	v := &Volume{Mountpoint: "/volume", FSType: "ext4", watchers: &table.watchers}
	one, leave := table.watchers.join("/volume")
	defer leave()
	ctx, cancel := context.WithCancel(t.Context())
	var got []Progress
	v.grows(&Progress{From: 1, Now: 1, Goal: 3})
	v.grows(&Progress{From: 1, Now: 2, Goal: 3})
	v.grows(nil)
	failure := errors.New("the caller is gone")
	err := table.follow(ctx, one, func(p Progress) error {
		got = append(got, p)
		if len(got) == 2 {
			return failure
		}
		return nil
	})
	cancel()
	if want := []Progress{{1, 1, 3}, {1, 2, 3}}; !slices.Equal(got, want) || !errors.Is(err, failure) {
		t.Errorf("want %v\ngot  %v, error %v", want, got, err)
	}
}

func TestWholeFilesystemsOfDisksAreVolumes(t *testing.T) {
	for _, test := range []struct {
		m    mount.Info
		want bool
	}{
		{mount.Info{Root: "/", Major: 254, FSType: "ext4", Source: "/dev/vda"}, true},
		{mount.Info{Root: "/folder", Major: 254, FSType: "ext4", Source: "/dev/vda"}, false},
		{mount.Info{Root: "/", FSType: "tmpfs", Source: "tmpfs"}, false},
		{mount.Info{Root: "/", FSType: "virtiofs", Source: "kataShared"}, false},
		{mount.Info{Root: "/sub", FSType: "btrfs", Source: "/dev/vda"}, true},
	} {
		if got := isVolume(&test.m); got != test.want {
			t.Errorf("%+v\nwant %v\ngot  %v", test.m, test.want, got)
		}
	}
}

// A list that waits for a server that hangs holds up another one until its deadline, and not
// longer.
func TestListThatWaitsForAnotherEndsInTime(t *testing.T) {
	table := newTable()
	table.listing <- struct{}{}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := table.List(ctx); errkind.Of(err) != errkind.DeadlineExceeded {
		t.Errorf("want a DeadlineExceeded\ngot  %v", err)
	}
}

// A mount is seen without an event, too: here nobody follows the mounts.
func TestWatchLooksAgainWithoutAnEvent(t *testing.T) {
	table, own := newTable(), mounttest.Dir(t)
	events := watched(t, table, own)
	wantEvent(t, events, Resynced, "")
	mountAt(t, mounttest.Attach(t, mounttest.Image(t, "ext4")), filepath.Join(own, "one"))
	wantEvent(t, events, Added, filepath.Join(own, "one"))
}

// A list does not wait until somebody has been woken by a mount, and has it nevertheless.
func TestListHasAMountThatWasJustMade(t *testing.T) {
	table, own := followed(t), mounttest.Dir(t)
	disk := mounttest.Attach(t, mounttest.Image(t, "ext4"))
	lists := func(path string) bool {
		t.Helper()
		reports, err := table.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(reports, func(r Report) bool { return r.Path == path })
	}
	for i := range 50 {
		path := filepath.Join(own, fmt.Sprint("just-", i))
		if lists(path) {
			t.Fatalf("%s is listed before it is mounted", path)
		}
		mounttest.Mount(t, disk, path, "ext4", 0, "")
		if !lists(path) {
			t.Fatalf("%s was mounted, and is not listed", path)
		}
		mounttest.Unmount(t, path)
		if lists(path) {
			t.Fatalf("%s was unmounted, and is listed", path)
		}
	}
}

// The volume is not locked, and its watch not paused, while GrowVolume waits for the host to make
// the disk larger: that may take as long as its caller waits.
func TestVolumeIsFreeWhileAGrowthWaitsForItsDisk(t *testing.T) {
	table, dir := newTable(), mounttest.Dir(t)
	image := mounttest.Image(t, "xfs")
	disk := mounttest.Attach(t, image)
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	v, err := table.Lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer table.Forget(dir)
	device, err := v.Device.Size()
	if err != nil {
		t.Fatal(err)
	}
	grown := make(chan error, 1)
	var last Progress
	go func() {
		grown <- table.Grow(t.Context(), dir, 2*device, func(p Progress) error { last = p; return nil })
	}()
	mounttest.Await(t, "the growth to wait for the disk", func() bool {
		stacks := make([]byte, 1<<20)
		return strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "blockdev.Await(")
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := table.Quiet(ctx, dir, func() (bool, error) { return false, nil }); err != nil {
		t.Errorf("unmount: %v", err)
	}
	mounttest.SetSize(t, disk, image, int64(2*device))
	if err := <-grown; err != nil || last.Now <= device {
		t.Errorf("want it grown with its disk\ngot  %+v, error %v", last, err)
	}
}
