package ctl

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// answers is what an agent answers about itself, its guest and volumes.
type answers struct {
	stats   map[string]*agentpb.VolumeStatsResponse // by the names of volumesOf
	details *agentpb.GuestDetailsResponse
	version *agentpb.VersionCheckResponse
	metrics *agentpb.Metrics
}

// volumesOf mounts volumes by our agent, and returns their paths in the guest, and that of a disk.
func volumesOf(t *testing.T, ctx context.Context, g *vm.Guest) map[string]string {
	t.Helper()
	paths := map[string]string{}
	for name, kind := range map[string]struct {
		fstype string
		bytes  int64
	}{"ext4": {"ext4", 64 << 20}, "xfs": {"xfs", 300 << 20}, "btrfs": {"btrfs", 256 << 20}, "full": {"ext4", 4 << 20}} {
		v, err := g.Volume(ctx, "fields-"+name, kind.fstype, kind.bytes)
		vmtest.Must(t, err)
		vmtest.Must(t, v.Mount(ctx))
		paths[name] = v.GuestPath
		if name != "full" {
			continue
		}
		if err := g.Remote.WriteFile(ctx, v.GuestPath+"/file", make([]byte, kind.bytes)); err == nil {
			t.Fatalf("%d bytes fit into a volume of as many", kind.bytes)
		}
		_, err = v.AwaitCondition(ctx, vm.Abnormal)
		vmtest.Must(t, err)
	}
	empty := g.Dir + "/raw"
	vmtest.Must(t, os.WriteFile(empty, nil, 0o600))
	vmtest.Must(t, os.Truncate(empty, rawBytes))
	_, err := g.VM().AttachDisk(ctx, qemu.Disk{ID: "raw", Path: empty, Serial: "raw"})
	vmtest.Must(t, err)
	paths["raw"], err = g.DeviceOf(ctx, "raw")
	vmtest.Must(t, err)
	return paths
}

// rawBytes is the size of a disk without a filesystem. No /dev of a guest has as much.
const rawBytes = 1 << 30

func ask(t *testing.T, ctx context.Context, to string, volumes map[string]string) answers {
	t.Helper()
	parsed, err := address.Parse(to)
	vmtest.Must(t, err)
	conn, err := parsed.Dial(ctx)
	vmtest.Must(t, err)
	client := ttrpc.NewClient(conn)
	defer client.Close()
	all := answers{stats: map[string]*agentpb.VolumeStatsResponse{}}
	for name, path := range volumes {
		err := status.Error(codes.DeadlineExceeded, "not asked yet")
		for status.Code(err) == codes.DeadlineExceeded && ctx.Err() == nil { // our agent's first look at the volume has not ended
			all.stats[name], err = service.Call[agentpb.VolumeStatsResponse](ctx, client, agentpb.AgentServiceName, "GetVolumeStats", &agentpb.VolumeStatsRequest{VolumeGuestPath: path})
		}
		vmtest.Must(t, err)
	}
	all.details, err = service.Call[agentpb.GuestDetailsResponse](ctx, client, agentpb.AgentServiceName, "GetGuestDetails", &agentpb.GuestDetailsRequest{MemBlockSize: true, MemHotplugProbe: true})
	vmtest.Must(t, err)
	all.version, err = service.Call[agentpb.VersionCheckResponse](ctx, client, agentpb.HealthServiceName, "Version", &agentpb.CheckRequest{})
	vmtest.Must(t, err)
	all.metrics, err = service.Call[agentpb.Metrics](ctx, client, agentpb.AgentServiceName, "GetMetrics", &agentpb.GetMetricsRequest{})
	vmtest.Must(t, err)
	return all
}

// alike are the fields that have the same value from both agents.
var alike = []struct {
	what string
	of   func(answers) any
}{
	{"usage of an xfs", func(a answers) any { return [2]any{*a.stats["xfs"].Usage[0], *a.stats["xfs"].Usage[1]} }},
	{"total bytes of an ext4", func(a answers) any { return a.stats["ext4"].Usage[0].Total }},
	{"used bytes of an ext4", func(a answers) any { return a.stats["ext4"].Usage[0].Used }},
	{"inodes of an ext4", func(a answers) any { return *a.stats["ext4"].Usage[1] }},
	{"total and used bytes of a btrfs", func(a answers) any { return [2]any{a.stats["btrfs"].Usage[0].Total, a.stats["btrfs"].Usage[0].Used} }},
	{"the condition of a healthy volume", func(a answers) any { return *a.stats["ext4"].VolumeCondition }},
	{"grpc_version", func(a answers) any { return a.version.GrpcVersion }},
	{"mem_block_size_bytes", func(a answers) any { return a.details.MemBlockSizeBytes }},
	{"support_mem_hotplug_probe", func(a answers) any { return a.details.SupportMemHotplugProbe }},
}

// differing are the fields that have not.
var differing = []struct {
	what       string
	of         func(answers) string
	ours, kata string
	why        string
}{
	{"GetVolumeStats of an ext4: `available`, in bytes", func(a answers) string {
		if b := a.stats["ext4"].Usage[0]; b.Available < b.Total-b.Used {
			return "without root's reserve"
		}
		return "with root's reserve"
	}, "without root's reserve", "with root's reserve", "a container cannot fill the reserve; df and the kubelet count as we do"},
	{"GetVolumeStats of a btrfs: units", func(a answers) string {
		var units []string
		for _, u := range a.stats["btrfs"].Usage {
			units = append(units, u.Unit.String())
		}
		return list(units)
	}, "BYTES", "BYTES, INODES", "a btrfs has no number of inodes; the kernel says 0 of 0, as if none were left"},
	{"GetVolumeStats of a disk of 1 GiB that is not mounted: `total`, in bytes", func(a answers) string {
		if a.stats["raw"].Usage[0].Total == rawBytes {
			return "the disk's"
		}
		return "of the filesystem with its node, /dev"
	}, "the disk's", "of the filesystem with its node, /dev", "a volume may be a disk that a container uses without a filesystem"},
	{"GetVolumeStats of a disk that is not mounted: `volume_condition`", func(a answers) string {
		if c := a.stats["raw"].VolumeCondition; c != nil {
			return c.Message
		}
		return "none"
	}, "none", "OK", "its health is not examined"},
	{"GetVolumeStats of a full volume: `volume_condition`", func(a answers) string {
		if c := a.stats["full"].VolumeCondition; !c.Abnormal {
			return "normal: " + c.Message
		}
		return "abnormal"
	}, "abnormal", "normal: OK", "kata-agent answers the same to every volume"},
	{"GetGuestDetails: `device_handlers`", func(a answers) string { return list(a.details.AgentDetails.DeviceHandlers) },
		"blk, scsi", "none", "the types of devices that CreateContainer takes"},
	{"GetGuestDetails: `storage_handlers`", func(a answers) string { return list(a.details.AgentDetails.StorageHandlers) },
		"blk, ephemeral, local, scsi, virtio-fs", "blk, ephemeral, erofs.multi-layer, image_guest_pull, local, mmioblk, nvdimm, overlayfs, scsi, virtio-fs, watchable-bind", "the drivers of storages that CreateContainer takes"},
	{"GetGuestDetails: `supports_seccomp`", func(a answers) string { return fmt.Sprint(a.details.AgentDetails.SupportsSeccomp) },
		"false", "true", notYet},
	{"GetGuestDetails: `extra_features`", func(a answers) string { return list(a.details.AgentDetails.ExtraFeatures) },
		"directvol-storage-only", "seccomp", "names what a client must not expect; kata-agent names parts that a build may leave out"},
	{"GetMetrics: prefix of the names", func(a answers) string {
		_, name, _ := strings.Cut(a.metrics.Metrics, "# TYPE ")
		first, _, _ := strings.Cut(name, "_agent_")
		return first
	}, "directvol", "kata", "other figures: docs/SPECIFICATION.md lists ours"},
}

// list returns the names in a list, which kata-agent gives in any order.
func list(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(slices.Sorted(slices.Values(names)), ", ")
}

// compareFields compares what both agents answer about the same guest and volume.
func compareFields(t *testing.T, ours, kata answers) {
	t.Helper()
	for _, f := range alike {
		if a, b := f.of(ours), f.of(kata); a != b {
			t.Errorf("%s\nwant %v, as kata-agent answers\ngot  %v", f.what, b, a)
		}
	}
	for _, f := range differing {
		if got := f.of(ours); got != f.ours {
			t.Errorf("%s\nwant %s\ngot  %s", f.what, f.ours, got)
		}
		if got := f.of(kata); got != f.kata {
			t.Errorf("%s of kata-agent\nwant %s\ngot  %s", f.what, f.kata, got)
		}
	}
}
