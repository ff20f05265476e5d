package volumes

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// share makes virtiofsd share a folder of the host during the test, and returns the socket.
func share(t *testing.T, folder string) string {
	t.Helper()
	program, err := vm.FindVirtiofsd()
	if err != nil {
		t.Skip(err)
	}
	socket := filepath.Join(t.TempDir(), "virtiofsd.sock")
	daemon, err := vm.StartVirtiofsd(program, folder, socket)
	must(t, err)
	t.Cleanup(func() {
		daemon.Stop()
		if t.Failed() {
			t.Log(daemon.Said())
		}
	})
	return socket
}

// A folder of the host is a storage, whose source is the tag of its virtio-fs device.
//
//	b2 ── 1c  vhost-user-fs, tag "shared" ── virtiofsd
func TestVirtioFSStorageIsAFolderOfTheHost(t *testing.T) {
	folder := t.TempDir()
	must(t, os.WriteFile(filepath.Join(folder, "host"), []byte("from the host"), 0o600))
	socket := share(t, folder)
	g := guest(t)
	leavesNoMount(t, g)
	const device, tag = "share", "shared"
	qmp := g.VM().QMP()
	execute(t, g, "chardev-add", map[string]any{"id": device, "backend": map[string]any{"type": "socket", "data": map[string]any{
		"server": false, "addr": map[string]any{"type": "unix", "data": map[string]any{"path": socket}},
	}}}, func(ctx context.Context) error {
		return qmp.Execute(ctx, "chardev-remove", map[string]any{"id": device}, nil)
	})
	execute(t, g, "device_add", map[string]any{"driver": "vhost-user-fs-pci", "id": device, "chardev": device, "tag": tag, "bus": "b2", "addr": "0x1c", "vectors": 0},
		func(ctx context.Context) error { return unplug(ctx, g, device) })
	storage := &agentpb.Storage{Driver: "virtio-fs", Source: tag, Fstype: "virtiofs", MountPoint: "/run/test/shared/"}
	must(t, container(t, g, "sharing", storage))
	must(t, container(t, g, "sharing-too", storage))
	data, err := g.Remote.ReadFile(limited(t), "/run/test/shared/host")
	must(t, err)
	must(t, g.Remote.WriteFile(limited(t), "/run/test/shared/guest", data))
	if back, err := os.ReadFile(filepath.Join(folder, "guest")); err != nil || string(back) != "from the host" {
		t.Errorf("what came back\nwant from the host\ngot  %q, error %v", back, err)
	}
	answer, err := g.Agent().GetVolumeStats(limited(t), storage.MountPoint)
	must(t, err)
	var host unix.Statfs_t
	must(t, unix.Statfs(folder, &host))
	if total, want := answer.Usage[0].Total, host.Blocks*uint64(host.Frsize); total != want {
		t.Errorf("bytes in all\nwant the host's %d\ngot  %d", want, total)
	}
	unknown := *storage
	unknown.Source, unknown.MountPoint = "nobody", "/run/test/unknown-tag"
	refused(t, container(t, g, "unknown", &unknown), codes.InvalidArgument, "nobody")
	remove(t, g, "sharing")
	if !vmtest.IsMounted(t, g, "/run/test/shared") {
		t.Error("it was unmounted from under the second container")
	}
	remove(t, g, "sharing-too")
}
