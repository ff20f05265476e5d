package rpc

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/volumepb"
)

func (a *Agent) listVolumes(ctx context.Context, _ *volumepb.ListVolumesRequest) (*volumepb.ListVolumesResponse, error) {
	reports, err := a.Volumes.List(ctx)
	if err != nil {
		return nil, err
	}
	response := &volumepb.ListVolumesResponse{}
	for _, r := range reports {
		response.Volumes = append(response.Volumes, volumeOf(r))
	}
	return response, nil
}

func (a *Agent) getVolume(ctx context.Context, r *volumepb.GetVolumeRequest) (*volumepb.Volume, error) {
	report, err := a.Volumes.Report(ctx, r.VolumeGuestPath)
	if err != nil {
		return nil, err
	}
	return volumeOf(report), nil
}

func (a *Agent) watchVolumes(ctx context.Context, _ *volumepb.WatchVolumesRequest, send func(*volumepb.VolumeEvent) error) error {
	return a.Volumes.Watch(ctx, func(e volume.Event) error {
		event := &volumepb.VolumeEvent{Type: eventTypes[e.Type]}
		if e.Report.Path != "" {
			event.Volume = volumeOf(e.Report)
		}
		return send(event)
	})
}

var eventTypes = map[volume.EventType]volumepb.VolumeEvent_Type{
	volume.Added:    volumepb.VolumeEvent_ADDED,
	volume.Changed:  volumepb.VolumeEvent_CHANGED,
	volume.Removed:  volumepb.VolumeEvent_REMOVED,
	volume.Resync:   volumepb.VolumeEvent_RESYNC,
	volume.Resynced: volumepb.VolumeEvent_RESYNCED,
}

func (a *Agent) growVolume(ctx context.Context, r *volumepb.GrowVolumeRequest, send func(*volumepb.GrowVolumeProgress) error) error {
	var last volume.Progress
	err := a.Volumes.Grow(ctx, r.VolumeGuestPath, r.Size_, func(p volume.Progress) error {
		last = p
		return send(progressOf(p))
	})
	if err != nil {
		return err
	}
	done := progressOf(last)
	done.Done = true
	return send(done)
}

func (a *Agent) freezeVolumes(ctx context.Context, r *volumepb.FreezeVolumesRequest, send func(*volumepb.FreezeVolumesResponse) error) error {
	length := time.Duration(r.LeaseMilliseconds) * time.Millisecond
	return a.Volumes.Freeze(ctx, r.VolumeGuestPaths, length, func(name string, volumes []volume.FrozenVolume) error {
		response := &volumepb.FreezeVolumesResponse{Lease: name}
		for _, v := range volumes {
			response.Volumes = append(response.Volumes, &volumepb.FrozenVolume{VolumeGuestPath: v.Path, Consistency: consistencies[v.Consistency]})
		}
		return send(response)
	})
}

var consistencies = map[volume.Consistency]volumepb.FrozenVolume_Consistency{
	volume.Frozen:          volumepb.FrozenVolume_FROZEN,
	volume.Synced:          volumepb.FrozenVolume_SYNCED,
	volume.CrashConsistent: volumepb.FrozenVolume_CRASH_CONSISTENT,
}

func (a *Agent) thawVolumes(ctx context.Context, r *volumepb.ThawVolumesRequest) (*emptypb.Empty, error) {
	return nothing, a.Volumes.Thaw(ctx, r.Lease)
}

func (a *Agent) syncVolume(ctx context.Context, r *volumepb.SyncVolumeRequest) (*emptypb.Empty, error) {
	return nothing, a.Volumes.SyncOne(ctx, r.VolumeGuestPath)
}

func (a *Agent) trimVolume(ctx context.Context, r *volumepb.TrimVolumeRequest) (*volumepb.TrimVolumeResponse, error) {
	trimmed, err := a.Volumes.Trim(ctx, r.VolumeGuestPath, r.LeastBytes)
	if err != nil {
		return nil, err
	}
	return &volumepb.TrimVolumeResponse{TrimmedBytes: trimmed}, nil
}

func volumeOf(r volume.Report) *volumepb.Volume {
	v := &volumepb.Volume{
		VolumeGuestPath: r.Path, Filesystem: r.FSType, Devices: r.Devices, DeviceBytes: r.DeviceBytes, FilesystemBytes: r.FilesystemBytes,
		Owned: r.Owned, ReadOnly: r.ReadOnly, Conditions: conditionsOf(r.Conditions), Frozen: r.Frozen,
	}
	if r.Growth != nil {
		v.Growth = progressOf(*r.Growth)
	}
	return v
}

func progressOf(p volume.Progress) *volumepb.GrowVolumeProgress {
	return &volumepb.GrowVolumeProgress{From: p.From, Now: p.Now, Goal: p.Goal}
}

func conditionsOf(all []health.Condition) (conditions []*volumepb.Condition) {
	for _, c := range all {
		condition := &volumepb.Condition{Status: volumepb.Condition_Status(c.Status), Reason: c.Reason, Message: c.Message}
		if !c.Since.IsZero() {
			condition.SinceUnixMilliseconds = c.Since.UnixMilli()
		}
		conditions = append(conditions, condition)
	}
	return conditions
}
