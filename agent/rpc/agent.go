// Package rpc has the calls of grpc.AgentService and grpc.Health as Kata Containers' clients make
// them, and those of directvol.v1.VolumeService, which is our own. It translates messages and kinds
// of errors, and decides nothing: agent/server decides when a call begins, and agent/sandbox and
// agent/volume decide its result. Methods that are not implemented are not listed, and ttrpc's
// server answers UNIMPLEMENTED for them.
package rpc

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/agent/contract"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/guest"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/metrics"
	"github.com/directvol/directvol/agent/sandbox"
	"github.com/directvol/directvol/agent/server"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
)

// StorageOnly is the extra feature that GetGuestDetails lists as long as CreateContainer mounts
// storages and starts no process.
const StorageOnly = "directvol-storage-only"

// Agent implements the services. All exported fields must be set before the first call.
type Agent struct {
	Log        *logrus.Entry
	Version    string // of this program
	Init       bool   // this program runs as PID 1
	Sandbox    *sandbox.Sandbox
	Storages   *storage.Table // those that the sandbox holds
	Volumes    *volume.Table
	Guest      guest.Guest
	ResizeWait time.Duration  // how long a resize waits for its device
	Destroyed  func()         // called after DestroySandbox has succeeded, before it answers
	Counts     *metrics.Calls // of the calls that the server has answered
}

// Methods returns the names of the agent's methods, by service.
func Methods() map[string][]string {
	names := map[string][]string{}
	for service, calls := range new(Agent).Calls() {
		names[service] = slices.Sorted(maps.Keys(calls))
	}
	return names
}

// Calls returns the implemented methods. Those that change who holds which storage are ordered, and
// so is CheckReleased, which asks about that.
func (a *Agent) Calls() server.Calls {
	return server.Calls{
		agentpb.AgentServiceName: {
			"CreateSandbox":         {Answer: method(a.createSandbox), Ordered: true},
			"DestroySandbox":        {Answer: method(a.destroySandbox), Ordered: true},
			"CreateContainer":       {Answer: method(a.createContainer), Ordered: true},
			"RemoveContainer":       {Answer: method(a.removeContainer), Ordered: true},
			"UpdateEphemeralMounts": {Answer: method(a.updateEphemeralMounts), Ordered: true},
			"GetVolumeStats":        {Answer: method(a.getVolumeStats), Quick: a.quickStats},
			"ResizeVolume":          {Answer: method(a.resizeVolume), Quick: a.quickResize, Timed: true},
			"GetGuestDetails":       {Answer: method(a.getGuestDetails)},
			"GetMetrics":            {Answer: method(a.getMetrics)},
		},
		volumepb.VolumeServiceName: {
			"CheckResizeVolume": {Answer: method(a.checkResizeVolume)},
			"GetVolumeHealth":   {Answer: method(a.getVolumeHealth)},
			"CheckReleased":     {Answer: method(a.checkReleased), Ordered: true},
			"ListVolumes":       {Answer: method(a.listVolumes)},
			"GetVolume":         {Answer: method(a.getVolume)},
			"WatchVolumes":      {Stream: stream(a.watchVolumes)},
			"GrowVolume":        {Stream: stream(a.growVolume)},
			"FreezeVolumes":     {Stream: stream(a.freezeVolumes)},
			"ThawVolumes":       {Answer: method(a.thawVolumes)},
			"SyncVolume":        {Answer: method(a.syncVolume)},
			"TrimVolume":        {Answer: method(a.trimVolume)},
		},
		agentpb.HealthServiceName: {
			"Check":   {Answer: method(a.check), Quick: quickCheck, Always: true},
			"Version": {Answer: method(a.version), Always: true},
		},
	}
}

var nothing = &emptypb.Empty{}

func (a *Agent) check(context.Context, *agentpb.CheckRequest) (*agentpb.HealthCheckResponse, error) {
	return &agentpb.HealthCheckResponse{Status: agentpb.HealthCheckResponse_SERVING}, nil
}

func (a *Agent) version(context.Context, *agentpb.CheckRequest) (*agentpb.VersionCheckResponse, error) {
	return &agentpb.VersionCheckResponse{GrpcVersion: agentpb.APIVersion, AgentVersion: a.Version}, nil
}

func (a *Agent) createSandbox(ctx context.Context, r *agentpb.CreateSandboxRequest) (*emptypb.Empty, error) {
	if err := contract.Check(r); err != nil {
		return nil, err
	}
	set := sandbox.Settings{Modules: r.KernelModules, Resolver: r.Dns, Hostname: r.Hostname}
	return nothing, a.Sandbox.Create(ctx, set, r.Storages)
}

func (a *Agent) destroySandbox(ctx context.Context, _ *agentpb.DestroySandboxRequest) (*emptypb.Empty, error) {
	if err := a.Sandbox.Destroy(ctx); err != nil {
		return nil, err
	}
	a.Destroyed()
	return nothing, nil
}

func (a *Agent) createContainer(ctx context.Context, r *agentpb.CreateContainerRequest) (*emptypb.Empty, error) {
	if err := contract.Check(r); err != nil {
		return nil, err
	}
	if err := a.Sandbox.CreateContainer(ctx, r.ContainerId, r.Storages, r.Devices); err != nil {
		return nil, err
	}
	a.Log.WithField("container", r.ContainerId).Info("container's storages are mounted; no process is made for it")
	return nothing, nil
}

func (a *Agent) removeContainer(ctx context.Context, r *agentpb.RemoveContainerRequest) (*emptypb.Empty, error) {
	if r.Timeout != 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(r.Timeout)*time.Second)
		defer cancel()
	}
	return nothing, a.Sandbox.RemoveContainer(ctx, r.ContainerId)
}

func (a *Agent) updateEphemeralMounts(ctx context.Context, r *agentpb.UpdateEphemeralMountsRequest) (*emptypb.Empty, error) {
	return nothing, a.Sandbox.Update(ctx, r.Storages)
}

func (a *Agent) getVolumeStats(ctx context.Context, r *agentpb.VolumeStatsRequest) (*agentpb.VolumeStatsResponse, error) {
	stats, err := a.Volumes.Stats(ctx, r.VolumeGuestPath)
	if err != nil {
		return nil, err
	}
	abnormal, message := health.Summary(stats.Conditions)
	response := statsResponse(&stats, abnormal, message)
	if stats.Unexamined {
		response.VolumeCondition = nil
	}
	return response, nil
}

// statsResponse is small enough to be inlined, so that marshalling the response in the caller needs
// no heap memory.
func statsResponse(stats *volume.Stats, abnormal bool, message string) *agentpb.VolumeStatsResponse {
	return &agentpb.VolumeStatsResponse{
		Usage: []*agentpb.VolumeUsage{
			{Unit: agentpb.VolumeUsage_BYTES, Total: stats.Bytes.Total, Used: stats.Bytes.Used, Available: stats.Bytes.Available},
			{Unit: agentpb.VolumeUsage_INODES, Total: stats.Inodes.Total, Used: stats.Inodes.Used, Available: stats.Inodes.Available},
		}[:1+min(stats.Inodes.Total, 1)], // without inodes if they are not counted
		VolumeCondition: &agentpb.VolumeCondition{Abnormal: abnormal, Message: message},
	}
}

func (a *Agent) getVolumeHealth(ctx context.Context, r *volumepb.GetVolumeHealthRequest) (*volumepb.GetVolumeHealthResponse, error) {
	stats, err := a.Volumes.Stats(ctx, r.VolumeGuestPath)
	if err != nil {
		return nil, err
	}
	if stats.Unexamined {
		return nil, errkind.New(errkind.FailedPrecondition, "volume %s is a block device without a mount: its health is not examined", r.VolumeGuestPath)
	}
	response := &volumepb.GetVolumeHealthResponse{}
	response.Conditions = conditionsOf(stats.Conditions)
	return response, nil
}

func (a *Agent) resizeVolume(ctx context.Context, r *agentpb.ResizeVolumeRequest) (*emptypb.Empty, error) {
	return nothing, a.Volumes.Resize(ctx, r.VolumeGuestPath, r.Size_, a.ResizeWait)
}

func (a *Agent) checkResizeVolume(ctx context.Context, r *volumepb.CheckResizeVolumeRequest) (*emptypb.Empty, error) {
	return nothing, a.Volumes.CheckResize(ctx, r.VolumeGuestPath, r.Size_)
}

func (a *Agent) checkReleased(ctx context.Context, r *volumepb.CheckReleasedRequest) (*emptypb.Empty, error) {
	return nothing, a.Sandbox.CheckReleased(ctx, r.ContainerId, r.Driver, r.Source)
}

func (a *Agent) getGuestDetails(_ context.Context, r *agentpb.GuestDetailsRequest) (*agentpb.GuestDetailsResponse, error) {
	details := &agentpb.GuestDetailsResponse{AgentDetails: &agentpb.AgentDetails{
		Version:         a.Version,
		InitDaemon:      a.Init,
		DeviceHandlers:  storage.DeviceDrivers(),
		StorageHandlers: storage.Drivers(),
		ExtraFeatures:   []string{StorageOnly},
	}}
	if r.MemBlockSize {
		var err error
		if details.MemBlockSizeBytes, err = a.Guest.MemoryBlockSize(); err != nil {
			return nil, err
		}
	}
	if r.MemHotplugProbe {
		details.SupportMemHotplugProbe = a.Guest.ProbesMemory()
	}
	return details, nil
}
