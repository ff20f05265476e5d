package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// daemon is a guest whose agent is a service, with the agent's program.
type daemon struct {
	*vm.Guest
	agent string
}

func TestServiceIsRestartedAndLosesNoVolume(t *testing.T) {
	losesNoVolume(t, daemon{shared.Last(t), remote.Agent})
}

// losesNoVolume ends the agent in every way, and each time another agent starts.
func losesNoVolume(t *testing.T, s daemon) {
	details, err := s.Agent().GetGuestDetails(vmtest.Limited(t))
	vmtest.Must(t, err)
	if details.AgentDetails.InitDaemon {
		t.Error("the agent says that it is PID 1")
	}
	// On SIGQUIT the Go runtime prints its goroutines and exits with status 2, as after a panic
	// that nobody recovers.
	for name, signal := range map[string]syscall.Signal{"SIGTERM": syscall.SIGTERM, "SIGKILL": syscall.SIGKILL, "SIGQUIT": syscall.SIGQUIT} {
		for _, fstype := range []string{"ext4", "xfs"} {
			t.Run(name+" while "+fstype+" is written to", func(t *testing.T) { restartsUnderAWriter(t, s, fstype, signal) })
		}
	}
	t.Run("SIGTERM lets a call in flight answer", func(t *testing.T) { answersBeforeItEnds(t, s) })
	t.Run("SIGKILL at any moment", func(t *testing.T) { survivesAnyMoment(t, s) })
	t.Run("SIGKILL while a volume grows", func(t *testing.T) { growsOn(t, s) })
	t.Run("SIGKILL, and its state is lost", func(t *testing.T) { takesGrownVolumeOver(t, s) })
	for _, fstype := range []string{"ext4", "xfs"} {
		t.Run("SIGKILL between the unmount of "+fstype+" and the proof of its release", func(t *testing.T) { provesReleaseAnew(t, s, fstype) })
	}
	t.Run("what failed before is told after", func(t *testing.T) { remembersFailedReads(t, s) })
	vmtest.Must(t, s.Agent().DestroySandbox(vmtest.Limited(t)))
}

// restart ends the agent and returns when another agent answers.
func restart(t *testing.T, s daemon, signal syscall.Signal) {
	t.Helper()
	ids, err := s.Remote.Signal(vmtest.Limited(t), s.agent, signal)
	vmtest.Must(t, err)
	vmtest.AwaitEnds(t, s.Guest, ids)
	vmtest.Must(t, s.Agent().Check(vmtest.Limited(t)))
}

func newVolume(t *testing.T, g *vm.Guest, id, fstype string) *vm.Volume {
	t.Helper()
	v, err := g.Volume(vmtest.Limited(t), id, fstype, map[string]int64{"btrfs": 256 * miB, "ext3": 128 * miB, "ext4": 128 * miB, "xfs": 320 * miB}[fstype])
	vmtest.Must(t, err)
	return v
}

// holds makes one more container hold a mounted volume.
func holds(t *testing.T, g *vm.Guest, v *vm.Volume, container string) {
	t.Helper()
	disk, _ := g.VM().Disk(v.DiskID())
	vmtest.Must(t, g.Agent().CreateContainer(vmtest.Limited(t), &agentpb.CreateContainerRequest{ContainerId: container, Storages: []*agentpb.Storage{
		{Driver: "blk", Source: disk.PCIPath, Fstype: v.FSType, MountPoint: v.GuestPath},
	}}))
}

// restartsUnderAWriter restarts the agent under a writer of a volume that two containers hold, and
// then makes every call of the volume.
func restartsUnderAWriter(t *testing.T, s daemon, fstype string, signal syscall.Signal) {
	v := newVolume(t, s.Guest, fmt.Sprintf("%s-%d", fstype, signal), fstype)
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	path := v.GuestPath
	holds(t, s.Guest, v, "second-"+v.ID)
	before, err := v.Stats(vmtest.Limited(t))
	vmtest.Must(t, err)
	w, err := v.StartWriter(vmtest.Within(t, vmtest.JobLimit), 0)
	vmtest.Must(t, err)
	vmtest.Must(t, w.Await(vmtest.Within(t, vmtest.JobLimit), 4*miB))

	restart(t, s, signal)
	after, err := v.Stats(vmtest.Limited(t))
	vmtest.Must(t, err)
	if after.Usage[0].Total != before.Usage[0].Total || after.VolumeCondition.Abnormal {
		t.Errorf("stats\nwant %v\ngot  %v", before, after)
	}
	vmtest.Must(t, v.Resize(vmtest.Limited(t), 512*miB))
	vmtest.Must(t, w.Await(vmtest.Within(t, vmtest.JobLimit), w.Ledger().Bytes()+4*miB))
	vmtest.Must(t, w.Stop(vmtest.Limited(t)))

	restart(t, s, signal)
	vmtest.Must(t, v.Unmount(vmtest.Limited(t)))
	if !vmtest.IsMounted(t, s.Guest, path) {
		t.Fatal("it was unmounted under its second holder")
	}
	v.GuestPath = path
	if _, err := v.Verify(vmtest.Within(t, vmtest.JobLimit), nil); err != nil {
		t.Error(err)
	}
	vmtest.Must(t, s.Agent().RemoveContainer(vmtest.Limited(t), "second-"+v.ID))
	if vmtest.IsMounted(t, s.Guest, path) {
		t.Error("its last holder has released it, but it is still mounted")
	}
	if _, err := s.Remote.Stat(vmtest.Limited(t), path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the mount point that was made for it is left: %v", err)
	}
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	if _, err := v.Verify(vmtest.Within(t, vmtest.JobLimit), nil); err != nil {
		t.Error(err)
	}
	vmtest.Detach(t, v)
}

// answersBeforeItEnds ends the agent while a ResizeVolume waits for its disk. The connection is
// never made again, so the answer on it comes from the agent that ends.
func answersBeforeItEnds(t *testing.T, s daemon) {
	const size = 192 * miB
	v := newVolume(t, s.Guest, "in-flight", "ext4")
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	to, err := address.Parse(s.VM().AgentAddress())
	vmtest.Must(t, err)
	conn, err := to.Dial(vmtest.Limited(t))
	vmtest.Must(t, err)
	defer conn.Close()
	vmtest.Must(t, conn.SetDeadline(time.Now().Add(vm.Limit(vmtest.CallLimit))))
	sends(t, conn, 1, agentpb.AgentServiceName, "ResizeVolume", &agentpb.ResizeVolumeRequest{VolumeGuestPath: v.GuestPath, Size_: size})
	// The agent reads requests in order: when it answers the second, it has the first.
	sends(t, conn, 3, agentpb.HealthServiceName, "Check", &agentpb.CheckRequest{})
	var header [ttrpcframe.HeaderBytes]byte
	_, err = io.ReadFull(conn, header[:])
	vmtest.Must(t, err)
	if first := ttrpcframe.ParseHeader(header[:]); first.StreamID != 3 {
		t.Fatalf("the first answer\nwant that of Check, on stream 3\ngot  %+v", first)
	}
	_, err = io.CopyN(io.Discard, conn, int64(ttrpcframe.ParseHeader(header[:]).Length))
	vmtest.Must(t, err)
	ids, err := s.Remote.Signal(vmtest.Limited(t), s.agent, syscall.SIGTERM)
	vmtest.Must(t, err)
	vmtest.Must(t, s.VM().ResizeDisk(vmtest.Limited(t), v.DiskID(), size))
	answer, err := io.ReadAll(conn)
	vmtest.Must(t, err)
	var response ttrpc.Response
	if len(answer) < ttrpcframe.HeaderBytes {
		t.Fatal("the agent ended without an answer")
	}
	vmtest.Must(t, proto.Unmarshal(answer[ttrpcframe.HeaderBytes:], &response))
	vmtest.Must(t, status.ErrorProto(response.Status))
	vmtest.AwaitEnds(t, s.Guest, ids)
	vmtest.Must(t, s.Agent().Check(vmtest.Limited(t))) // the next agent
	vmtest.Detach(t, v)
}

// sends writes a request to a connection.
func sends(t *testing.T, conn net.Conn, stream uint32, service, method string, m proto.Message) {
	t.Helper()
	payload, err := proto.Marshal(m)
	vmtest.Must(t, err)
	request, err := proto.Marshal(&ttrpc.Request{Service: service, Method: method, Payload: payload})
	vmtest.Must(t, err)
	_, err = conn.Write(append(ttrpcframe.Header{Length: uint32(len(request)), StreamID: stream, Type: ttrpcframe.TypeRequest}.Append(nil), request...))
	vmtest.Must(t, err)
}

// survivesAnyMoment kills the agent again and again while it mounts and unmounts. In the end
// nothing remains that cannot be released.
func survivesAnyMoment(t *testing.T, s daemon) {
	const rounds = 12
	first, second := newVolume(t, s.Guest, "any-1", "ext4"), newVolume(t, s.Guest, "any-2", "xfs")
	var storages []*agentpb.Storage
	for _, v := range []*vm.Volume{first, second} {
		vmtest.Must(t, s.Attach(vmtest.Limited(t), v.Volume))
		disk, _ := s.VM().Disk(v.DiskID())
		storages = append(storages, &agentpb.Storage{Driver: "blk", Source: disk.PCIPath, Fstype: v.FSType, MountPoint: "/run/any/" + v.ID})
	}
	create := &agentpb.CreateContainerRequest{ContainerId: "any", Storages: storages}
	for round := range rounds {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			// The outcome of a killed call is unknown, and does not matter.
			ctx, cancel := context.WithTimeout(t.Context(), vm.Limit(vmtest.CallLimit))
			defer cancel()
			if s.Agent().CreateContainer(ctx, create) == nil {
				_ = s.Agent().RemoveContainer(ctx, "any")
			}
		}()
		for range 3 * round { // a little later each time, measured by the progress of the guest
			_, err := s.Remote.Stat(vmtest.Limited(t), "/")
			vmtest.Must(t, err)
		}
		restart(t, s, syscall.SIGKILL)
		<-ended
		// The repeated call succeeds, whatever was killed when.
		vmtest.Must(t, s.Agent().CreateContainer(vmtest.Limited(t), create))
		for _, storage := range storages {
			if !vmtest.IsMounted(t, s.Guest, storage.MountPoint) {
				t.Fatalf("round %d: %s is not mounted", round, storage.MountPoint)
			}
		}
		if round%2 == 0 {
			restart(t, s, syscall.SIGKILL)
		}
		vmtest.Must(t, s.Agent().RemoveContainer(vmtest.Limited(t), "any"))
		for _, storage := range storages {
			if vmtest.IsMounted(t, s.Guest, storage.MountPoint) {
				t.Fatalf("round %d: %s is still mounted", round, storage.MountPoint)
			}
		}
	}
	for _, v := range []*vm.Volume{first, second} {
		vmtest.Detach(t, v)
	}
}

// growsOn kills the agent again and again while it grows an xfs. The writer never waits for the
// agent, and the repeated call reaches the size.
func growsOn(t *testing.T, s daemon) {
	const rounds = 6
	v := newVolume(t, s.Guest, "grows-on", "xfs")
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	ctx := vmtest.Within(t, vmtest.JobLimit)
	writer, err := v.StartWriter(ctx, 0)
	vmtest.Must(t, err)
	size := uint64(320 * miB)
	for round := range rounds {
		size += 8192 * miB // many groups, so that the growth takes some time
		vmtest.Must(t, s.VM().ResizeDisk(vmtest.Limited(t), v.DiskID(), size))
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = s.Agent().ResizeVolume(vmtest.Limited(t), v.GuestPath, size) // the agent may be killed meanwhile
		}()
		for range 1 + 6*round { // a little later each time, measured by the progress of the guest
			_, err := s.Remote.Stat(vmtest.Limited(t), "/")
			vmtest.Must(t, err)
		}
		restart(t, s, syscall.SIGKILL)
		<-ended
		vmtest.Must(t, writer.Await(ctx, writer.Ledger().Bytes()+miB))
		vmtest.Must(t, s.Agent().ResizeVolume(vmtest.Limited(t), v.GuestPath, size))
	}
	vmtest.Must(t, writer.Stop(ctx))
	sizes, err := v.Sizes(vmtest.Limited(t))
	vmtest.Must(t, err)
	if sizes.FSBytes < size-1024*miB {
		t.Errorf("the filesystem\nwant nearly %d bytes\ngot  %d", size, sizes.FSBytes)
	}
	vmtest.Detach(t, v)
}

// agentState is the default path of the state file of an agent that is a service.
const agentState = "/run/directvol/agent.json"

// takesGrownVolumeOver starts an agent without the state of the previous agent. The new agent takes
// over a volume that the previous one mounted and grew, although a grown ext4 of 16 groups or more
// shows a mount option that nobody asked for.
func takesGrownVolumeOver(t *testing.T, s daemon) {
	v, err := s.Guest.Volume(vmtest.Limited(t), "taken-over", "ext4", 64*miB)
	vmtest.Must(t, err)
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	path := v.GuestPath
	writer, err := v.StartWriter(vmtest.Within(t, vmtest.JobLimit), 4*miB)
	vmtest.Must(t, err)
	vmtest.Must(t, v.Resize(vmtest.Limited(t), 256*miB))
	vmtest.Must(t, writer.Err())
	mounts, err := s.Remote.ReadFile(vmtest.Limited(t), "/proc/self/mountinfo")
	vmtest.Must(t, err)
	if !strings.Contains(string(mounts), "mb_optimize_scan=0") {
		t.Errorf("want a mount with an option of the kernel's own, or this test shows nothing\ngot  %s", mounts)
	}
	vmtest.Must(t, s.Remote.WriteFile(vmtest.Limited(t), agentState, []byte("{")))
	restart(t, s, syscall.SIGKILL)
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	if v.GuestPath != path {
		t.Errorf("it is mounted\nwant at %s\ngot  at %s", path, v.GuestPath)
	}
	vmtest.Must(t, v.Unmount(vmtest.Limited(t)))
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	if _, err := v.Verify(vmtest.Within(t, vmtest.JobLimit), nil); err != nil {
		t.Error(err)
	}
	vmtest.Detach(t, v)
}

// provesReleaseAnew kills the agent when it has unmounted a volume that another mount namespace
// still has. No later agent says that the volume is released until it is.
func provesReleaseAnew(t *testing.T, s daemon, fstype string) {
	v := newVolume(t, s.Guest, "proven-"+fstype, fstype)
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	vmtest.Must(t, v.Touch(vmtest.Limited(t)))
	disk, _ := s.VM().Disk(v.DiskID())
	isReleased := func() error {
		return s.Agent().CheckReleased(vmtest.Limited(t), "blk", disk.PCIPath, v.Container())
	}
	end, err := s.KeepMounts(vmtest.Within(t, vmtest.JobLimit))
	vmtest.Must(t, err)
	// Stop the agent and unmount in its place: this is the moment after umount(2), extended until
	// the agent is killed.
	_, err = s.Remote.Signal(vmtest.Limited(t), s.agent, syscall.SIGSTOP)
	vmtest.Must(t, err)
	vmtest.Must(t, s.Remote.Unmount(vmtest.Limited(t), v.GuestPath, 0))
	for _, state := range []string{"as it was written before the unmount", "as the next agent has written it", "lost"} {
		if state == "lost" {
			vmtest.Must(t, s.Remote.WriteFile(vmtest.Limited(t), agentState, []byte("{")))
		}
		restart(t, s, syscall.SIGKILL)
		for what, err := range map[string]error{"CheckReleased": isReleased(), "Detach": v.Detach(vmtest.Limited(t))} {
			if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "in use") || !strings.Contains(err.Error(), "test-guest") {
				t.Errorf("%s, with the state %s\nwant FAILED_PRECONDITION with its holder\ngot  %v", what, state, err)
			}
		}
	}
	if _, there := s.VM().Disk(v.DiskID()); !there {
		t.Fatal("the host has pulled the disk")
	}
	end()
	vmtest.Must(t, vm.Again(vmtest.Limited(t), func() (bool, error) { return isReleased() == nil, nil })) // the namespace's end continues in the kernel
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	vmtest.Must(t, v.Touch(vmtest.Limited(t)))
	vmtest.Detach(t, v)
}

// remembersFailedReads makes reads of a volume fail, which no later check can see.
func remembersFailedReads(t *testing.T, s daemon) {
	v := newVolume(t, s.Guest, "unreadable", "xfs")
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	vmtest.Must(t, v.Touch(vmtest.Limited(t)))
	vmtest.Must(t, s.Remote.WriteFile(vmtest.Limited(t), "/proc/sys/vm/drop_caches", []byte("1")))
	vmtest.Must(t, v.BreakReads(vmtest.Limited(t)))
	if _, err := s.Remote.ReadFile(vmtest.Limited(t), v.GuestPath+"/touched"); !errors.Is(err, syscall.EIO) {
		t.Fatalf("a read from a broken disk\nwant EIO\ngot  %v", err)
	}
	failedReads := func(c *agentpb.VolumeCondition) bool {
		return c.Abnormal && strings.Contains(c.Message, "reads have failed")
	}
	_, err := v.AwaitCondition(vmtest.Limited(t), failedReads)
	vmtest.Must(t, err)
	vmtest.Must(t, v.Heal(vmtest.Limited(t)))
	healed := time.Now()
	restart(t, s, syscall.SIGKILL)
	if stats, err := v.Stats(vmtest.Limited(t)); err != nil || !failedReads(stats.VolumeCondition) {
		t.Errorf("after the restart\nwant reads that have failed\ngot  %v, error %v", stats, err)
	}
	vmtest.Must(t, v.Unmount(vmtest.Limited(t)))
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	if stats, err := v.Stats(vmtest.Limited(t)); err != nil || stats.VolumeCondition.Abnormal {
		t.Errorf("mounted afresh\nwant it healthy\ngot  %v, error %v", stats, err)
	}

	// And once more, while no agent is running to hear it.
	quiet := time.NewTimer(time.Until(healed.Add(logInterval)))
	defer quiet.Stop()
	<-quiet.C
	_, err = s.Remote.Signal(vmtest.Limited(t), s.agent, syscall.SIGSTOP)
	vmtest.Must(t, err)
	vmtest.Must(t, s.Remote.WriteFile(vmtest.Limited(t), "/proc/sys/vm/drop_caches", []byte("1")))
	vmtest.Must(t, v.BreakReads(vmtest.Limited(t)))
	if _, err := s.Remote.ReadFile(vmtest.Limited(t), v.GuestPath+"/touched"); !errors.Is(err, syscall.EIO) {
		t.Fatalf("a read from a broken disk\nwant EIO\ngot  %v", err)
	}
	vmtest.Must(t, v.Heal(vmtest.Limited(t)))
	restart(t, s, syscall.SIGKILL)
	_, err = v.AwaitCondition(vmtest.Limited(t), failedReads)
	vmtest.Must(t, err)
	vmtest.Detach(t, v)
}

// logInterval is longer than the five seconds in which the kernel logs at most ten failed reads
// (DEFAULT_RATELIMIT_INTERVAL). No event announces their end. The clock of an emulated guest is the
// host's.
const logInterval = 6 * time.Second
