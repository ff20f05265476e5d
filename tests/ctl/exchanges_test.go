package ctl

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
	"github.com/directvol/directvol/protocols/volumepb"
)

// exchange is a sequence of bytes that a client sends on its own connection, and the codes that
// each agent answers. The effects of an exchange stay for the next one.
type exchange struct {
	what       string
	send       func(place) []byte
	ours, kata string
	why        string // the reason for a difference
	slowly     bool   // each byte is sent by itself
	hangsUp    bool   // the client sends no more; answers are received until the agent hangs up too
}

// call makes the frame of a call, on a stream, with a time-out or without.
type call func(stream uint32, timeout time.Duration) []byte

func of(service, method string, payload []byte) call {
	return func(stream uint32, timeout time.Duration) []byte {
		return framed(stream, &ttrpc.Request{Service: service, Method: method, Payload: payload, TimeoutNano: int64(timeout)})
	}
}

func framed(stream uint32, r *ttrpc.Request) []byte {
	request := encoded(proto.Marshal(r))
	return append(head(len(request), stream, ttrpcframe.TypeRequest), request...)
}

// withMetadata makes a call on stream 1 with a pair of metadata.
func withMetadata(service, method, key string) []byte {
	return framed(1, &ttrpc.Request{Service: service, Method: method, Metadata: []*ttrpc.KeyValue{{Key: key, Value: "value"}}})
}

// flagged sets the flags of a frame.
func flagged(frame []byte, flags byte) []byte {
	frame[ttrpcframe.HeaderBytes-1] = flags
	return frame
}

// many repeats a call on n streams.
func many(n int, c call) func(place) []byte {
	return func(place) (all []byte) {
		for i := range n {
			all = append(all, c(uint32(2*i+1), 0)...)
		}
		return all
	}
}

// okOfMany are the answers to many.
func okOfMany(n int) string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf("%d OK", 2*i+1))
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

func head(length int, stream uint32, kind ttrpcframe.Type) []byte {
	return ttrpcframe.Header{Length: uint32(length), StreamID: stream, Type: kind}.Append(nil)
}

func encoded(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

func health(method string, payload []byte) call {
	return of(agentpb.HealthServiceName, method, payload)
}

var (
	check   = health("Check", nil)
	details = of(agentpb.AgentServiceName, "GetGuestDetails", nil)
)

// sends returns the same bytes for both agents.
func sends(all ...[]byte) func(place) []byte {
	return func(place) []byte { return slices.Concat(all...) }
}

// calls makes one call of AgentService.
func calls(method string, request func(place) proto.Message) func(place) []byte {
	return func(p place) []byte {
		return of(agentpb.AgentServiceName, method, encoded(proto.Marshal(request(p))))(1, 0)
	}
}

func stats(path string) func(place) []byte {
	return calls("GetVolumeStats", func(place) proto.Message { return &agentpb.VolumeStatsRequest{VolumeGuestPath: path} })
}

// statsOf asks about a path that belongs to the place.
func statsOf(path func(place) string) func(place) []byte {
	return func(p place) []byte { return stats(path(p))(p) }
}

// rawStats sends the bytes before a VolumeStatsRequest of the volume.
func rawStats(before string) func(place) []byte {
	return func(p place) []byte {
		request := encoded((&agentpb.VolumeStatsRequest{VolumeGuestPath: p.volume}).Marshal())
		return of(agentpb.AgentServiceName, "GetVolumeStats", append([]byte(before), request...))(1, 0)
	}
}

func resize(bytes uint64) func(place) []byte {
	return resizeOf(func(p place) string { return p.volume }, bytes)
}

func resizeOf(path func(place) string, bytes uint64) func(place) []byte {
	return calls("ResizeVolume", func(p place) proto.Message {
		return &agentpb.ResizeVolumeRequest{VolumeGuestPath: path(p), Size_: bytes}
	})
}

func always(path string) func(place) string { return func(place) string { return path } }

func below(name string) func(place) string { return func(p place) string { return p.dir + "/" + name } }

func remove(id string) func(place) []byte {
	return calls("RemoveContainer", func(place) proto.Message { return &agentpb.RemoveContainerRequest{ContainerId: id} })
}

func sandbox(set func(*agentpb.CreateSandboxRequest)) func(place) []byte {
	return calls("CreateSandbox", func(place) proto.Message {
		r := &agentpb.CreateSandboxRequest{SandboxId: "answers"}
		set(r)
		return r
	})
}

// container makes a container with everything that Kata's agent needs.
func container(id string, set func(place, *agentpb.CreateContainerRequest)) func(place) []byte {
	return calls("CreateContainer", func(p place) proto.Message {
		r := &agentpb.CreateContainerRequest{ContainerId: id, ExecId: id, OCI: &agentpb.Spec{
			Version: "1.1.0", Hostname: id, Root: &agentpb.Root{Path: p.dir + "/root"},
			Process: &agentpb.Process{Args: []string{testGuest, "serve"}, Cwd: "/", User: &agentpb.User{}, Capabilities: &agentpb.LinuxCapabilities{}},
			Mounts:  []*agentpb.Mount{{Destination: "/proc", Type: "proc", Source: "proc"}, {Destination: "/dev", Type: "tmpfs", Source: "tmpfs"}},
			Linux: &agentpb.Linux{CgroupsPath: "/" + id, Resources: &agentpb.LinuxResources{},
				Namespaces: []*agentpb.LinuxNamespace{{Type: "mount"}, {Type: "uts"}, {Type: "ipc"}}},
		}}
		set(p, r)
		return r
	})
}

func bare(place, *agentpb.CreateContainerRequest) {}

// holds makes a container with the disk, mounted at a separate place.
func holds(id string, set func(place, *agentpb.Storage)) func(place) []byte {
	return container(id, func(p place, r *agentpb.CreateContainerRequest) {
		s := &agentpb.Storage{Driver: "blk", Source: p.disk, Fstype: "ext4", MountPoint: p.dir + "/" + id}
		set(p, s)
		r.Storages = []*agentpb.Storage{s}
	})
}

func device(set func(place, *agentpb.Device)) func(place) []byte {
	return container("device", func(p place, r *agentpb.CreateContainerRequest) {
		d := &agentpb.Device{Id: p.spare, Type: "blk", VmPath: "/dev/vda", ContainerPath: "/dev/data"}
		set(p, d)
		r.Devices = []*agentpb.Device{d}
	})
}

func options(all ...string) func(place, *agentpb.Storage) {
	return func(_ place, s *agentpb.Storage) { s.Options = all }
}

func tmpfs(at string, options ...string) func(place, *agentpb.Storage) {
	return func(p place, s *agentpb.Storage) {
		*s = agentpb.Storage{Driver: "ephemeral", Source: "tmpfs", Fstype: "tmpfs", MountPoint: p.dir + "/" + at, Options: options}
	}
}

func local(options ...string) func(place, *agentpb.Storage) {
	return func(p place, s *agentpb.Storage) {
		*s = agentpb.Storage{Driver: "local", Source: "local", Fstype: "local", MountPoint: p.dir + "/local", Options: options}
	}
}

// The reasons that several differences share.
const (
	sayWhich = "our codes say whether the caller, the guest or the agent is at fault; kata-agent answers INTERNAL to all"
	notYet   = "no process is started yet: the agent holds storages for containers (docs/messages.md)"
	noResize = "kata-agent has no ResizeVolume"
	refuses  = "refused by its name, not dropped (docs/messages.md)"
)

var exchanges = slices.Concat(ofServices, ofVolumes, ofSandboxes, ofContainers, ofStorages, clears, ofFrames)

var undecodable = []byte{0xff}

var ofServices = []exchange{
	{what: "Check", send: sends(check(1, 0)), ours: "OK", kata: "OK"},
	{what: "Check of a service by its name", send: sends(health("Check", []byte("\x0a\x02no"))(1, 0)), ours: "OK", kata: "OK"},
	{what: "Check with a field that nobody knows", send: sends(health("Check", []byte("\xf8\x07\x01"))(1, 0)), ours: "OK", kata: "OK"},
	{what: "Version", send: sends(health("Version", nil)(1, 0)), ours: "OK", kata: "OK"},
	{what: "GetGuestDetails", send: sends(details(1, 0)), ours: "OK", kata: "OK"},
	{what: "GetMetrics", send: sends(of(agentpb.AgentServiceName, "GetMetrics", nil)(1, 0)), ours: "OK", kata: "OK"},
	{what: "a request that is no message", send: sends(health("Check", undecodable)(1, 0)), ours: "INVALID_ARGUMENT", kata: "UNKNOWN", why: "the caller is at fault"},
	{what: "Check with metadata", send: sends(withMetadata(agentpb.HealthServiceName, "Check", "key")), ours: "OK", kata: "OK"},
	{what: "Check with a group that nobody knows", send: sends(health("Check", []byte("\x7b\x7c"))(1, 0)), ours: "OK", kata: "OK"},
	{what: "Check with a number in the place of its text", send: sends(health("Check", []byte("\x08\x01"))(1, 0)), ours: "INVALID_ARGUMENT", kata: "OK", why: "the caller has another message"},
	{what: "Check of a service whose name is not UTF-8", send: sends(health("Check", []byte("\x0a\x01\xff"))(1, 0)), ours: "OK", kata: "UNKNOWN", why: "the name is not used, and paths of Linux are any bytes"},
	{what: "Check with a field 0", send: sends(health("Check", []byte("\x00\x00"))(1, 0)), ours: "INVALID_ARGUMENT", kata: "UNKNOWN", why: "the caller is at fault"},
	{what: "Check of AgentService", send: sends(of(agentpb.AgentServiceName, "Check", nil)(1, 0)), ours: "UNIMPLEMENTED", kata: "UNIMPLEMENTED"},
	{what: "GetVolumeStats of Health", send: sends(health("GetVolumeStats", nil)(1, 0)), ours: "UNIMPLEMENTED", kata: "UNIMPLEMENTED"},
	{what: "a service without its package", send: sends(of("Health", "Check", nil)(1, 0)), ours: "UNIMPLEMENTED", kata: "INVALID_ARGUMENT", why: "as ttrpc's server in Go answers"},
	{what: "the health service of gRPC", send: sends(of("grpc.health.v1.Health", "Check", nil)(1, 0)), ours: "UNIMPLEMENTED", kata: "INVALID_ARGUMENT", why: "as ttrpc's server in Go answers"},
	{what: "a method that no service has", send: sends(health("Chequer", nil)(1, 0)), ours: "UNIMPLEMENTED", kata: "UNIMPLEMENTED"},
	{what: "a service that does not exist", send: sends(of("no.such.Service", "Check", nil)(1, 0)), ours: "UNIMPLEMENTED", kata: "INVALID_ARGUMENT", why: "as ttrpc's server in Go answers"},
	{what: "no service and no method", send: sends(of("", "", nil)(1, 0)), ours: "UNIMPLEMENTED", kata: "INVALID_ARGUMENT", why: "as ttrpc's server in Go answers"},
	{what: "GetVolumeHealth of our own service", send: sends(of(volumepb.VolumeServiceName, "GetVolumeHealth", nil)(1, 0)), ours: "INVALID_ARGUMENT", kata: "INVALID_ARGUMENT"},
	{what: "ListVolumes of our own service", send: sends(of(volumepb.VolumeServiceName, "ListVolumes", nil)(1, 0)), ours: "OK", kata: "INVALID_ARGUMENT", why: "kata-agent has no `directvol.v1.VolumeService`; its code is the same for each of the service's calls"},
	{what: "SetPolicy", send: sends(of(agentpb.AgentServiceName, "SetPolicy", nil)(1, 0)), ours: "UNIMPLEMENTED", kata: "NOT_FOUND", why: "as ttrpc's server in Go answers; a runtime sends it where a policy is set"},
	{what: "StartContainer of no container", send: sends(of(agentpb.AgentServiceName, "StartContainer", nil)(1, 0)), ours: "UNIMPLEMENTED", kata: "INTERNAL", why: notYet},
}

var ofVolumes = []exchange{
	{what: "GetVolumeStats of a volume", send: func(p place) []byte { return stats(p.volume)(p) }, ours: "OK", kata: "OK"},
	{what: "the same, with a slash behind it", send: func(p place) []byte { return stats(p.volume + "/")(p) }, ours: "OK", kata: "OK"},
	{what: "the same, by a path that is not clean", send: statsOf(func(p place) string { return "/..//etc/./.." + p.volume }), ours: "OK", kata: "OK"},
	{what: "the same, through a symbolic link", send: statsOf(func(p place) string { return "/proc/1/root" + p.volume }), ours: "INVALID_ARGUMENT", kata: "OK", why: "a link of a container could lead anywhere"},
	{what: "the same, behind another path", send: rawStats("\x0a\x03/no"), ours: "OK", kata: "OK"},
	{what: "the same, with fields that nobody knows", send: rawStats("\x10\x01\xfa\x07\x02no"), ours: "OK", kata: "OK"},
	{what: "the same, with metadata", send: func(p place) []byte {
		return framed(1, &ttrpc.Request{Service: agentpb.AgentServiceName, Method: "GetVolumeStats", Metadata: []*ttrpc.KeyValue{{Key: "key"}},
			Payload: encoded((&agentpb.VolumeStatsRequest{VolumeGuestPath: p.volume}).Marshal())})
	}, ours: "OK", kata: "OK"},
	{what: "GetVolumeStats of a tmpfs", send: stats("/run"), ours: "OK", kata: "OK"},
	{what: "GetVolumeStats of a filesystem without blocks", send: stats("/proc"), ours: "OK", kata: "OK"},
	{what: "GetVolumeStats of /", send: stats("/"), ours: "OK", kata: "OK"},
	{what: "GetVolumeStats of what does not exist", send: stats("/no/such"), ours: "NOT_FOUND", kata: "INTERNAL", why: sayWhich},
	{what: "GetVolumeStats of a folder that is no mount point", send: stats("/etc"), ours: "INVALID_ARGUMENT", kata: "OK", why: "the figures would be those of another filesystem"},
	{what: "GetVolumeStats of a file", send: stats("/proc/version"), ours: "INVALID_ARGUMENT", kata: "OK", why: "the figures would be those of another filesystem"},
	{what: "GetVolumeStats of a relative path", send: stats("run"), ours: "INVALID_ARGUMENT", kata: "OK", why: "an agent has no working directory that a host knows"},
	{what: "GetVolumeStats of an empty path", send: stats(""), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "GetVolumeStats of a path that is not UTF-8", send: stats("/\xff"), ours: "NOT_FOUND", kata: "UNKNOWN", why: "paths of Linux are any bytes"},
	{what: "GetVolumeStats of a name of 256 bytes", send: stats("/" + strings.Repeat("x", 256)), ours: "NOT_FOUND", kata: "INTERNAL", why: sayWhich},
	{what: "GetVolumeStats of a path of 4096 bytes", send: stats(strings.Repeat("/x", 2048)), ours: "NOT_FOUND", kata: "INTERNAL", why: sayWhich},
	{what: "GetVolumeStats of a path that fills a frame", send: longest("GetVolumeStats"), ours: "NOT_FOUND", kata: "INTERNAL", why: sayWhich},
	{what: "GetVolumeStats of a path with a zero byte", send: stats("/run\x00"), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "GetVolumeStats of a disk that is not mounted", send: statsOf(func(p place) string { return p.node }), ours: "OK", kata: "OK"},
	{what: "ResizeVolume of a disk that is not mounted", send: resizeOf(func(p place) string { return p.node }, 0), ours: "OK", kata: "UNIMPLEMENTED", why: noResize},
	{what: "ResizeVolume of an empty path", send: resizeOf(always(""), 0), ours: "INVALID_ARGUMENT", kata: "UNIMPLEMENTED", why: noResize},
	{what: "ResizeVolume of a relative path", send: resizeOf(always("run"), 0), ours: "INVALID_ARGUMENT", kata: "UNIMPLEMENTED", why: noResize},
	{what: "ResizeVolume of what does not exist", send: resizeOf(always("/no/such"), 0), ours: "NOT_FOUND", kata: "UNIMPLEMENTED", why: noResize},
	{what: "ResizeVolume of a folder that is no mount point", send: resizeOf(always("/etc"), 0), ours: "INVALID_ARGUMENT", kata: "UNIMPLEMENTED", why: noResize},
	{what: "ResizeVolume of a tmpfs", send: resizeOf(always("/run"), 0), ours: "FAILED_PRECONDITION", kata: "UNIMPLEMENTED", why: noResize},
	{what: "ResizeVolume of a path that is not UTF-8", send: resizeOf(always("/\xff"), 0), ours: "NOT_FOUND", kata: "UNKNOWN", why: noResize},
	{what: "ResizeVolume that is no message", send: sends(of(agentpb.AgentServiceName, "ResizeVolume", undecodable)(1, 0)), ours: "INVALID_ARGUMENT", kata: "UNKNOWN", why: "the caller is at fault"},
	{what: "ResizeVolume to a block less and a byte more", send: resize(volumeBytes - 1024 + 1), ours: "OK", kata: "UNIMPLEMENTED", why: noResize},
	{what: "ResizeVolume to more than its disk has", send: resize(4 * volumeBytes), ours: "DEADLINE_EXCEEDED", kata: "UNIMPLEMENTED", why: noResize},
	{what: "ResizeVolume to the size that it has", send: resize(volumeBytes), ours: "OK", kata: "UNIMPLEMENTED", why: noResize},
	{what: "ResizeVolume to 0, the end of the device", send: resize(0), ours: "OK", kata: "UNIMPLEMENTED", why: noResize},
	{what: "ResizeVolume to less", send: resize(4096), ours: "OUT_OF_RANGE", kata: "UNIMPLEMENTED", why: noResize},
	{what: "ResizeVolume to more than an ext4 can have", send: resize(1<<64 - 1), ours: "FAILED_PRECONDITION", kata: "UNIMPLEMENTED", why: noResize},
}

var ofSandboxes = []exchange{
	{what: "RemoveContainer before CreateSandbox", send: remove("nobody"), ours: "OK", kata: "INTERNAL", why: "nothing is held for a container that does not exist: a repeated call succeeds"},
	{what: "CreateContainer without an OCI spec", send: container("no-spec", func(_ place, r *agentpb.CreateContainerRequest) { r.OCI = nil }), ours: "OK", kata: "INTERNAL", why: notYet},
	{what: "CreateSandbox with a kernel module that does not exist", send: sandbox(func(r *agentpb.CreateSandboxRequest) {
		r.KernelModules = []*agentpb.KernelModule{{Name: "no_such_module"}}
	}), ours: "NOT_FOUND", kata: "INTERNAL", why: sayWhich},
	{what: "CreateSandbox with a kernel module that has no name", send: sandbox(func(r *agentpb.CreateSandboxRequest) { r.KernelModules = []*agentpb.KernelModule{{}} }), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "CreateSandbox with `sandbox_pidns` and a `guest_hook_path`", send: sandbox(func(r *agentpb.CreateSandboxRequest) {
		r.SandboxPidns, r.GuestHookPath = true, "/no/such"
	}), ours: "UNIMPLEMENTED", kata: "OK", why: refuses},
	{what: "CreateSandbox again", send: sandbox(func(*agentpb.CreateSandboxRequest) {}), ours: "OK", kata: "INTERNAL", why: "repeated, it changes nothing; kata-agent cannot make its namespaces twice"},
	{what: "UpdateEphemeralMounts of a disk", send: calls("UpdateEphemeralMounts", func(p place) proto.Message {
		return &agentpb.UpdateEphemeralMountsRequest{Storages: []*agentpb.Storage{{Driver: "blk", Source: p.disk, Fstype: "ext4", MountPoint: p.dir + "/none"}}}
	}), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "UpdateEphemeralMounts of what is not mounted", send: calls("UpdateEphemeralMounts", func(p place) proto.Message {
		return &agentpb.UpdateEphemeralMountsRequest{Storages: []*agentpb.Storage{{Driver: "ephemeral", Source: "tmpfs", Fstype: "tmpfs", MountPoint: p.dir + "/none", Options: []string{"remount", "size=1m"}}}}
	}), ours: "NOT_FOUND", kata: "INTERNAL", why: sayWhich},
}

var ofContainers = []exchange{
	{what: "CreateContainer", send: holds("whole", func(place, *agentpb.Storage) {}), ours: "OK", kata: "OK"},
	{what: "GetVolumeStats of its disk", send: func(p place) []byte { return stats(p.dir + "/whole")(p) }, ours: "OK", kata: "OK"},
	{what: "RemoveContainer", send: remove("whole"), ours: "OK", kata: "OK"},
	{what: "RemoveContainer again", send: remove("whole"), ours: "OK", kata: "INTERNAL", why: "repeated, it changes nothing"},
	{what: "GetVolumeStats of its disk then", send: func(p place) []byte { return stats(p.dir + "/whole")(p) }, ours: "NOT_FOUND", kata: "INTERNAL", why: sayWhich},
	{what: "CreateContainer once", send: holds("twice", func(place, *agentpb.Storage) {}), ours: "OK", kata: "OK"},
	{what: "CreateContainer twice", send: holds("twice", func(place, *agentpb.Storage) {}), ours: "OK", kata: "INTERNAL", why: "repeated, it changes nothing"},
	{what: "RemoveContainer of the container that was created twice", send: remove("twice"), ours: "OK", kata: "INTERNAL", why: "kata-agent's second call has ended the first one's container"},
	{what: "GetVolumeStats of the disk of the container that was created twice", send: func(p place) []byte { return stats(p.dir + "/twice")(p) }, ours: "NOT_FOUND", kata: "OK", why: "kata-agent counts a call that failed, and leaves the disk mounted"},
	{what: "CreateContainer with an id that is a path", send: container("../x", bare), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "CreateContainer with an id of 256 bytes", send: container(strings.Repeat("a", 256), bare), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "RemoveContainer with an id that is a path", send: remove("../x"), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "CreateContainer without a process", send: container("no-process", func(_ place, r *agentpb.CreateContainerRequest) { r.OCI.Process = nil }), ours: "OK", kata: "INTERNAL", why: notYet},
	{what: "CreateContainer with `shared_mounts`", send: container("shared-mounts", func(_ place, r *agentpb.CreateContainerRequest) {
		r.SharedMounts = []*agentpb.SharedMount{{Name: "x", SrcCtr: "x", DstCtr: "y"}}
	}), ours: "UNIMPLEMENTED", kata: "OK", why: refuses},
	{what: "a device of an unknown type", send: device(func(_ place, d *agentpb.Device) { d.Type = "floppy" }), ours: "UNIMPLEMENTED", kata: "INTERNAL", why: sayWhich},
	{what: "a device without a name", send: device(func(_ place, d *agentpb.Device) { d.Id, d.VmPath = "", "" }), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "a device at what is no PCI path", send: device(func(_ place, d *agentpb.Device) { d.Id = "x/y" }), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "a device that does not come", send: device(func(_ place, d *agentpb.Device) { d.Id = "02/1d" }), ours: "DEADLINE_EXCEEDED", kata: "INTERNAL", why: "the disk may still appear: call again"},
}

var ofStorages = []exchange{
	{what: "a storage of an unknown driver", send: holds("driver", func(_ place, s *agentpb.Storage) { s.Driver = "floppy" }), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "a disk by a node that does not exist", send: holds("node", func(_ place, s *agentpb.Storage) { s.Source = "/dev/none" }), ours: "DEADLINE_EXCEEDED", kata: "INTERNAL", why: "the disk may still appear: call again"},
	{what: "a disk at a slot that is empty", send: holds("slot", func(_ place, s *agentpb.Storage) { s.Source = "02/1d" }), ours: "DEADLINE_EXCEEDED", kata: "INTERNAL", why: "the disk may still appear: call again"},
	{what: "a disk that is /dev/null", send: holds("null", func(_ place, s *agentpb.Storage) { s.Source = "/dev/null" }), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "a disk that holds another file system", send: holds("other", func(_ place, s *agentpb.Storage) { s.Fstype = "xfs" }), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "a disk that holds none", send: holds("empty", func(p place, s *agentpb.Storage) { s.Source = p.spare }), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "a disk without a mount point", send: holds("nowhere", func(_ place, s *agentpb.Storage) { s.MountPoint = "" }), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "a mount point that is a file", send: holds("file", func(p place, s *agentpb.Storage) { s.MountPoint = p.dir + "/file" }), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "an option that ext4 does not have", send: holds("option", options("nosuchoption")), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "the options `bind`, `rw` of CSI drivers", send: holds("bind", options("bind", "rw")), ours: "OK", kata: "INTERNAL", why: "they have a meaning on the host only"},
	{what: "RemoveContainer of that disk", send: remove("bind"), ours: "OK", kata: "INTERNAL", why: "nothing is held for a container that does not exist: a repeated call succeeds"},
	{what: "the options `_netdev`, `nofail`, `lazytime`", send: holds("netdev", options("_netdev", "nofail", "lazytime")), ours: "OK", kata: "INTERNAL", why: "they have a meaning on the host only"},
	{what: "RemoveContainer of that disk again", send: remove("netdev"), ours: "OK", kata: "INTERNAL", why: "nothing is held for a container that does not exist: a repeated call succeeds"},
	{what: "two options in one string", send: holds("joined", options("ro,noatime")), ours: "OK", kata: "INTERNAL", why: "some callers write options like this"},
	{what: "GetVolumeStats of it, which is read-only", send: statsOf(below("joined")), ours: "OK", kata: "OK"},
	{what: "ResizeVolume of it", send: resizeOf(below("joined"), 0), ours: "FAILED_PRECONDITION", kata: "UNIMPLEMENTED", why: noResize},
	{what: "RemoveContainer of that disk once more", send: remove("joined"), ours: "OK", kata: "INTERNAL", why: "nothing is held for a container that does not exist: a repeated call succeeds"},
	{what: "fstab's defaults one by one", send: holds("fstab", options("rw", "suid", "dev", "exec", "async")), ours: "OK", kata: "OK"},
	{what: "RemoveContainer with them", send: remove("fstab"), ours: "OK", kata: "OK"},
	{what: "a disk by its node", send: holds("by-node", func(p place, s *agentpb.Storage) { s.Source = p.node }), ours: "OK", kata: "OK"},
	{what: "RemoveContainer with it", send: remove("by-node"), ours: "OK", kata: "OK"},
	{what: "driver_options that nobody knows", send: holds("unknown", func(_ place, s *agentpb.Storage) { s.DriverOptions = []string{"what=ever"} }), ours: "UNIMPLEMENTED", kata: "OK", why: refuses},
	{what: "`fs_group`", send: holds("group", func(_ place, s *agentpb.Storage) { s.FsGroup = &agentpb.FSGroup{GroupId: 7} }), ours: "UNIMPLEMENTED", kata: "OK", why: refuses},
	{what: "a tmpfs as Kata sends one", send: holds("shm", tmpfs("shm", "noexec", "nosuid", "nodev", "mode=1777", "size=1048576")), ours: "OK", kata: "OK"},
	{what: "a tmpfs with `fsgid=`", send: holds("fsgid", tmpfs("fsgid", "fsgid=7")), ours: "UNIMPLEMENTED", kata: "OK", why: refuses},
	{what: "a tmpfs without a source", send: holds("source", func(p place, s *agentpb.Storage) { tmpfs("source")(p, s); s.Source = "" }), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "a local folder as Kata sends one", send: holds("local", local("mode=0777")), ours: "OK", kata: "OK"},
	{what: "a local folder with an option that nobody knows", send: holds("local-option", local("x=1")), ours: "INVALID_ARGUMENT", kata: "OK", why: refuses},
	{what: "virtio-fs where no device has the tag", send: holds("tag", func(_ place, s *agentpb.Storage) { s.Driver, s.Source, s.Fstype = "virtio-fs", "none", "virtiofs" }), ours: "DEADLINE_EXCEEDED", kata: "INTERNAL", why: "the disk may still appear: call again"},
	{what: "a SCSI disk that does not come", send: holds("scsi", func(_ place, s *agentpb.Storage) { s.Driver, s.Source = "scsi", "0:9" }), ours: "DEADLINE_EXCEEDED", kata: "INTERNAL", why: "the disk may still appear: call again"},
	{what: "a `shared` disk", send: holds("shares", func(_ place, s *agentpb.Storage) { s.Shared = true }), ours: "OK", kata: "OK"},
	{what: "RemoveContainer of its container", send: remove("shares"), ours: "OK", kata: "OK"},
	{what: "GetVolumeStats of it then", send: func(p place) []byte { return stats(p.dir + "/shares")(p) }, ours: "OK", kata: "OK"},
	{what: "another disk at its mount point", send: holds("taken", func(p place, s *agentpb.Storage) { s.Source, s.MountPoint = p.spare, p.dir+"/shares" }), ours: "ALREADY_EXISTS", kata: "OK", why: "kata-agent counts by the mount point alone, and the container would have another's volume"},
}

// left are the containers that both agents, or one of them, still have.
var left = []string{"shared-mounts", "unknown", "group", "shm", "fsgid", "local", "local-option", "taken"}

// clears removes them, because the processes of kata-agent's containers hold the guest's mounts.
var clears = []exchange{{what: "RemoveContainer of all that are left", send: func(p place) (all []byte) {
	for i, id := range left {
		all = append(all, of(agentpb.AgentServiceName, "RemoveContainer", encoded(proto.Marshal(&agentpb.RemoveContainerRequest{ContainerId: id})))(uint32(2*i+1), 0)...)
	}
	return all
}, ours: eachOK, kata: eachOK}}

const eachOK = "1 OK, 11 OK, 13 OK, 15 OK, 3 OK, 5 OK, 7 OK, 9 OK"

// longest makes a call of AgentService as long as a frame may be, with a text in its first field.
func longest(method string) func(place) []byte {
	request := func(text string) []byte {
		field := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), text)
		return of(agentpb.AgentServiceName, method, field)(1, 0)
	}
	const most = ttrpcframe.HeaderBytes + ttrpcframe.MaxLength
	rest := len(request(strings.Repeat("/", most/2))) - most/2
	return sends(request("/" + strings.Repeat("x", most-rest-1)))
}

var ofFrames = []exchange{
	{what: "a call whose deadline has passed", send: sends(details(1, -1)), ours: "DEADLINE_EXCEEDED", kata: "OK", why: "nobody waits for it; a time-out below 0 is what ttrpc's client in Go sends then"},
	{what: "a Check whose deadline has passed", send: sends(check(1, -1)), ours: "OK", kata: "OK"},
	{what: "a call with a time-out of a nanosecond", send: sends(details(1, 1)), ours: "DEADLINE_EXCEEDED", kata: "OK", why: "nobody waits for it"},
	{what: "a call with the longest time-out", send: sends(details(1, 1<<63-1)), ours: "OK", kata: "OK"},
	{what: "a call with the lowest time-out", send: sends(details(1, -1<<63)), ours: "DEADLINE_EXCEEDED", kata: "OK", why: "nobody waits for it; a time-out below 0 is what ttrpc's client in Go sends then"},
	{what: "a call byte by byte", send: sends(details(1, 0)), slowly: true, ours: "OK", kata: "OK"},
	{what: "a Check byte by byte", send: sends(check(1, 0)), slowly: true, ours: "OK", kata: "OK"},
	{what: "a hundred calls in one write", send: many(100, details), ours: okOfMany(100), kata: okOfMany(100)},
	{what: "a hundred Checks in one write", send: many(100, check), ours: okOfMany(100), kata: okOfMany(100)},
	{what: "a call whose stream stays open", send: sends(flagged(details(1, 0), 2)), ours: "OK", kata: "OK"},
	{what: "a call whose stream is closed", send: sends(flagged(details(1, 0), 1)), ours: "OK", kata: "OK"},
	{what: "a call with flags that nobody knows", send: sends(flagged(details(1, 0), 0xf8)), ours: "OK", kata: "OK"},
	{what: "a call without data", send: sends(flagged(details(1, 0), 4)), ours: "OK", kata: "OK"},
	{what: "half a header, and the end", send: sends(check(1, 0)[:5]), hangsUp: true, ours: hungUp, kata: hungUp},
	{what: "half a Check, and the end", send: sends(check(1, 0)[:15]), hangsUp: true, ours: hungUp, kata: hungUp},
	{what: "half of a frame that is too long, and the end", send: sends(head(1<<32-1, 1, ttrpcframe.TypeRequest), make([]byte, 1<<16)), hangsUp: true, ours: hungUp, kata: hungUp},
	{what: "a connection of gRPC, and the end", send: sends([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")), hangsUp: true, ours: hungUp, kata: hungUp},
	{what: "a request of HTTP, and the end", send: sends([]byte("GET / HTTP/1.1\r\n\r\n")), hangsUp: true, ours: hungUp, kata: hungUp},
	{what: "nothing, and the end", send: sends(), hangsUp: true, ours: hungUp, kata: hungUp},
	{what: "stream 0", send: sends(check(0, 0), check(1, 0)), ours: "0 INVALID_ARGUMENT, 1 OK", kata: "0 INVALID_ARGUMENT, 1 OK"},
	{what: "an even stream", send: sends(details(2, 0), check(3, 0)), ours: "2 INVALID_ARGUMENT, 3 OK", kata: "2 INVALID_ARGUMENT, 3 OK"},
	{what: "a stream twice", send: sends(check(1, 0), check(1, 0)), ours: "1 OK, 1 OK", kata: "1 OK, 1 OK"},
	{what: "streams that go down", send: sends(check(5, 0), check(3, 0)), ours: "3 OK, 5 OK", kata: "3 OK, 5 OK"},
	{what: "streams of slow calls that go down", send: sends(details(5, 0), details(3, 0), check(1, 0)), ours: "1 OK, 3 OK, 5 OK", kata: "1 OK, 3 OK, 5 OK"},
	{what: "two calls in one write", send: sends(details(1, 0), check(3, 0)), ours: "1 OK, 3 OK", kata: "1 OK, 3 OK"},
	{what: "frames of types 0, 2 and 9", send: sends(head(0, 1, 0), head(0, 3, ttrpcframe.TypeResponse), head(1, 5, 9), []byte{0}, check(7, 0)), ours: "7 OK", kata: "7 OK"},
	{what: "data for no call", send: sends(head(0, 1, ttrpcframe.TypeData), check(3, 0)), ours: "1 INVALID_ARGUMENT, 3 OK", kata: "1 INVALID_ARGUMENT, 3 OK"},
	{what: "a frame of length 0", send: sends(head(0, 1, ttrpcframe.TypeRequest)), ours: "UNIMPLEMENTED", kata: "INVALID_ARGUMENT", why: "it asks for no service: as ttrpc's server in Go answers"},
	{what: "a frame that is no request", send: sends(head(1, 1, ttrpcframe.TypeRequest), undecodable), ours: "INVALID_ARGUMENT", kata: "INVALID_ARGUMENT"},
	{what: "a frame of 4 MiB", send: longest("RemoveContainer"), ours: "INVALID_ARGUMENT", kata: "INTERNAL", why: sayWhich},
	{what: "a frame of 4 MiB and a byte", send: sends(head(ttrpcframe.MaxLength+1, 1, ttrpcframe.TypeRequest), make([]byte, ttrpcframe.MaxLength+1)), ours: "RESOURCE_EXHAUSTED", kata: "INVALID_ARGUMENT", why: "as ttrpc's server in Go answers"},
}
