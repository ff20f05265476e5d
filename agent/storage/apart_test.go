package storage_test

import (
	"context"
	"maps"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/protocols/agentpb"
)

// A storage with another one nested in it waits for the nested one, but not for a disk that hangs
// elsewhere.
func TestDiskThatHangsKeepsNoOtherMounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKernel()
		defer storage.SetFakeKernel(k)()
		table := newTable()
		var all []*agentpb.Storage
		for _, device := range []string{"outer", "outer/inner", "slow"} {
			k.plugged[device] = true
			all = append(all, &agentpb.Storage{Driver: storage.FakeDriver, Source: device, MountPoint: place(device)})
		}
		if err := table.Hold(t.Context(), "c1", all, func() bool { return true }); err != nil {
			t.Fatal(err)
		}
		k.change(func() { k.hung["slow"] = true })
		released := make(chan error, 1)
		go func() { released <- table.Release(context.Background(), "c1") }()
		synctest.Wait()
		if left, _ := k.now(); !slices.Equal(slices.Collect(maps.Keys(left)), []string{place("slow")}) {
			t.Errorf("mounted, while one disk hangs\nwant that one's alone\ngot  %v", left)
		}
		k.change(func() { k.hung["slow"] = false })
		if err := <-released; err != nil {
			t.Error(err)
		}
	})
}
