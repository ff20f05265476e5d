package rpc

import (
	"context"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/metrics"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
)

func (a *Agent) getMetrics(ctx context.Context, _ *agentpb.GetMetricsRequest) (*agentpb.Metrics, error) {
	agent := metrics.Agent{Version: a.Version, Calls: a.Counts, Drivers: storage.Drivers(), Volumes: a.counted(ctx), Trimmed: a.Volumes.Trimmed()}
	text, err := agent.Text()
	if err != nil {
		return nil, err
	}
	return &agentpb.Metrics{Metrics: text}, nil
}

// counted returns the mounted storages as metrics counts them.
func (a *Agent) counted(ctx context.Context) (volumes []metrics.Volume) {
	var paths []string
	for _, m := range a.Storages.Mounted() {
		paths = append(paths, m.MountPoint)
		volumes = append(volumes, metrics.Volume{Driver: m.Driver})
	}
	for i, conditions := range a.Volumes.Conditions(ctx, paths) {
		for _, c := range conditions {
			volumes[i].Conditions = append(volumes[i].Conditions, metrics.Condition{Status: statusName(c.Status), Reason: c.Reason})
		}
	}
	return volumes
}

// statusName returns the status's name in CSI 1.13.
func statusName(status health.Status) string { return volumepb.Condition_Status(status).String() }
