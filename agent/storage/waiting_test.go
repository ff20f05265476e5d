package storage_test

import (
	"io"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/agentpb"
)

// newTable returns a table over the fake kernel. Nobody reads its log.
func newTable() *storage.Table {
	log := logrus.New()
	log.SetOutput(io.Discard)
	entry := logrus.NewEntry(log)
	return storage.NewTable(entry, volume.NewTable(health.NewMonitor(entry)), hotplug, nil)
}

// While calls mount and unmount a disk that hangs, Waiting names the disk for its holders.
func TestDiskThatCallsWaitForIsNamedToItsHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel()
		defer storage.SetFakeKernel(k)()
		table := newTable()
		k.plugged["a"] = true
		expect := func(when string, want ...string) {
			t.Helper()
			synctest.Wait()
			for _, holders := range [][]string{{"c1"}, {"other", "c1"}, nil} {
				if got := table.Waiting(holders...); !slices.Equal(got, want) {
					t.Errorf("%s, of %q\nwant %q\ngot  %q", when, holders, want, got)
				}
			}
			if got := table.Waiting("other"); len(got) > 0 {
				t.Errorf("%s, of another\nwant none\ngot  %q", when, got)
			}
		}
		hangs := func(is bool) { k.change(func() { k.hung["a"] = is }) }
		ended := make(chan error)
		expect("before")
		hangs(true)
		go func() {
			ended <- table.Hold(t.Context(), "c1", []*agentpb.Storage{{Driver: storage.FakeDriver, Source: "a", MountPoint: place("a")}}, func() bool { return true })
		}()
		expect("while it is mounted", "a at "+place("a"))
		hangs(false)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		expect("when it is mounted")
		hangs(true)
		go func() { ended <- table.Release(t.Context(), "c1") }()
		expect("while it is unmounted", "a at "+place("a"))
		hangs(false)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		expect("when it is unmounted")
	})
}
