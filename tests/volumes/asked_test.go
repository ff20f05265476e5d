package volumes

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/agentpb"
)

// CreateSandbox sets a sandbox's hostname, resolver and modules. A call that asks for something
// that does not exist leaves them unchanged.
func TestSandboxGetsWhatItAsksFor(t *testing.T) {
	g := guest(t)
	has := func(path, want string) {
		t.Helper()
		if text, err := g.Remote.ReadFile(limited(t), path); err != nil || strings.TrimSpace(string(text)) != want {
			t.Errorf("%s\nwant %q\ngot  %q, error %v", path, want, text, err)
		}
	}
	asked := &agentpb.CreateSandboxRequest{SandboxId: "asks", Hostname: "a-pod", Dns: []string{"nameserver 192.0.2.53", "search example.org"},
		KernelModules: []*agentpb.KernelModule{{Name: "virtio-blk"}, {Name: "ext4"}, {Name: "xfs"}}}
	for range 2 {
		must(t, g.Agent().CreateSandbox(limited(t), asked))
		has("/proc/sys/kernel/hostname", asked.Hostname)
		has("/etc/resolv.conf", strings.Join(asked.Dns, "\n"))
	}
	for name, c := range map[string]struct {
		change func(*agentpb.CreateSandboxRequest)
		code   codes.Code
		says   string
	}{
		"a module that is nowhere": {func(r *agentpb.CreateSandboxRequest) {
			r.KernelModules = []*agentpb.KernelModule{{Name: "no_such_module"}}
		}, codes.NotFound, "no_such_module"},
		"a module by a path": {func(r *agentpb.CreateSandboxRequest) { r.KernelModules = []*agentpb.KernelModule{{Name: "../xfs"}} }, codes.InvalidArgument, "../xfs"},
		"a module, too late": {func(r *agentpb.CreateSandboxRequest) {
			r.KernelModules = []*agentpb.KernelModule{{Name: "virtio_blk", Parameters: []string{"queue_depth=77"}}}
		}, codes.FailedPrecondition, "queue_depth"},
		"a name that is too long":         {func(r *agentpb.CreateSandboxRequest) { r.Hostname = strings.Repeat("x", 65) }, codes.InvalidArgument, "hostname"},
		"two lines that are given as one": {func(r *agentpb.CreateSandboxRequest) { r.Dns = []string{"a\nb"} }, codes.InvalidArgument, "dns"},
		"a shared PID namespace":          {func(r *agentpb.CreateSandboxRequest) { r.SandboxPidns = true }, codes.Unimplemented, "sandbox_pidns"},
		"a hook":                          {func(r *agentpb.CreateSandboxRequest) { r.GuestHookPath = "/hooks" }, codes.Unimplemented, "guest_hook_path"},
		"a storage that does not come": {func(r *agentpb.CreateSandboxRequest) {
			r.Storages = []*agentpb.Storage{{Driver: "blk", Source: nowhere, Fstype: "ext4", MountPoint: "/run/test/asked"}}
		}, codes.DeadlineExceeded, nowhere},
	} {
		t.Run(name, func(t *testing.T) {
			r := &agentpb.CreateSandboxRequest{Hostname: "another", Dns: []string{"nameserver 192.0.2.1"}}
			c.change(r)
			refused(t, g.Agent().CreateSandbox(limited(t), r), c.code, c.says)
			has("/proc/sys/kernel/hostname", asked.Hostname)
			has("/etc/resolv.conf", strings.Join(asked.Dns, "\n"))
		})
	}
}

func TestContainerGetsTheDevicesThatItAsksFor(t *testing.T) {
	g := guest(t)
	_, storage := attached(t, g, "ext4")
	with := func(r *agentpb.CreateContainerRequest) error {
		r.ContainerId = "devices"
		return g.Agent().CreateContainer(limited(t), r)
	}
	must(t, with(&agentpb.CreateContainerRequest{OCI: &agentpb.Spec{Version: "1.1.0"}, Devices: []*agentpb.Device{{Type: "blk", Id: storage.Source, VmPath: "/dev/any", ContainerPath: "/dev/disk"}}}))
	remove(t, g, "devices")
	for name, c := range map[string]struct {
		request *agentpb.CreateContainerRequest
		code    codes.Code
		says    string
	}{
		"at an empty slot":     {&agentpb.CreateContainerRequest{Devices: []*agentpb.Device{{Type: "blk", Id: nowhere}}}, codes.DeadlineExceeded, nowhere},
		"by a node":            {&agentpb.CreateContainerRequest{Devices: []*agentpb.Device{{Type: "blk", VmPath: "/dev/vdzz"}}}, codes.DeadlineExceeded, "/dev/vdzz"},
		"of an unknown type":   {&agentpb.CreateContainerRequest{Devices: []*agentpb.Device{{Type: "vfio-pci", Id: nowhere}}}, codes.Unimplemented, "vfio-pci"},
		"of no name":           {&agentpb.CreateContainerRequest{Devices: []*agentpb.Device{{Type: "blk"}}}, codes.InvalidArgument, "id"},
		"with options":         {&agentpb.CreateContainerRequest{Devices: []*agentpb.Device{{Type: "blk", Id: storage.Source, Options: []string{"x"}}}}, codes.Unimplemented, "devices[0].options"},
		"beside shared_mounts": {&agentpb.CreateContainerRequest{SharedMounts: []*agentpb.SharedMount{{Name: "x"}}}, codes.Unimplemented, "shared_mounts"},
		"beside hooks":         {&agentpb.CreateContainerRequest{OCI: &agentpb.Spec{Hooks: &agentpb.Hooks{}}}, codes.Unimplemented, "OCI.Hooks"},
	} {
		t.Run(name, func(t *testing.T) { refused(t, with(c.request), c.code, c.says) })
	}
}
