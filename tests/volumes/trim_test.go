package volumes

import (
	"bytes"
	"context"
	"os"
	"path"
	"testing"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/vm"
)

// stored returns how many bytes of a sparse file on the host are stored.
func stored(t *testing.T, file string) int64 {
	t.Helper()
	var s unix.Stat_t
	must(t, unix.Stat(file, &s))
	return s.Blocks * 512
}

// A trim punches holes into the store: its blocks go back to the host. The volume is larger than
// the range that is trimmed at once, and no block is trimmed twice.
func TestTrimFreesTheStoresBlocks(t *testing.T) {
	everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		const size, file = 9 << 30, 16 * miB
		v, err := g.Volume(limited(t), "trim-"+fstype, fstype, size)
		must(t, err)
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
			defer cancel()
			if err := v.Detach(ctx); err != nil {
				t.Error(err)
			}
			_ = os.Remove(v.Path)
		})
		must(t, v.Mount(limited(t)))
		client := ttrpc.NewClient(dialPort(t, g, agentpb.Port))
		defer client.Close()
		trim := func() uint64 {
			answer, err := service.Call[volumepb.TrimVolumeResponse](within(t, jobLimit), client, volumepb.VolumeServiceName, "TrimVolume", &volumepb.TrimVolumeRequest{VolumeGuestPath: v.GuestPath})
			must(t, err)
			if answer.TrimmedBytes > size {
				t.Errorf("want each block trimmed once\ngot  %d bytes of %d", answer.TrimmedBytes, uint64(size))
			}
			return answer.TrimmedBytes
		}
		trim()
		full := path.Join(v.GuestPath, "file")
		for offset := int64(0); offset < file; offset += miB {
			must(t, g.Remote.WriteAt(limited(t), full, offset, bytes.Repeat([]byte{1}, miB)))
		}
		must(t, g.Remote.Sync(limited(t), v.GuestPath))
		before := stored(t, v.Path)
		must(t, g.Remote.WriteFile(limited(t), full, nil)) // its blocks are free now
		ctx := within(t, jobLimit)
		for stored(t, v.Path) > before-file*9/10 && ctx.Err() == nil { // an xfs frees them in the background
			t.Logf("%d bytes trimmed, %d stored", trim(), stored(t, v.Path))
		}
		if after := stored(t, v.Path); before-after < file*9/10 {
			t.Errorf("the store\nwant %d bytes less than %d\ngot  %d", int64(file), before, after)
		}
	})
}
