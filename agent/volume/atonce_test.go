package volume

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/health"
)

func TestOnlyWhatWaitsForNobodyIsMeasuredAtOnce(t *testing.T) {
	for fstype, want := range map[string]bool{"tmpfs": true, "virtiofs": false, "fuse": false, "nfs4": false, "overlay": false, "ext4": false} {
		v := &Volume{FSType: fstype} // a tmpfs is without a watch, an ext4 whose device is not known too
		if _, got := v.conditionsAtOnce(); got != want {
			t.Errorf("%s without a watch\nwant at once %v\ngot          %v", fstype, want, got)
		}
	}
}

func TestTmpfsIsMeasuredAtOnceAsByTheServer(t *testing.T) {
	const path = "/dev/shm"
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil || st.Type != unix.TMPFS_MAGIC || st.Fsid == (unix.Fsid{}) {
		t.Skipf("%s is no tmpfs with an identity: mount one there, on Linux 5.14 or newer", path)
	}
	table := NewTable(health.NewMonitor(nil))
	if _, ok := table.StatsAtOnce(path); ok {
		t.Error("a volume was answered for that nobody had looked up: is it one?")
	}
	want, err := table.Stats(t.Context(), path)
	if err != nil {
		t.Skipf("%v: a mount with nothing over it is wanted: unmount what lies over /dev/shm", err)
	}
	got, ok := table.StatsAtOnce(path)
	if !ok || got.Bytes.Total != want.Bytes.Total || got.fsid != want.fsid || len(got.Conditions) != 0 {
		t.Errorf("\nwant %+v\ngot  %+v, %v", want, got, ok)
	}
}
