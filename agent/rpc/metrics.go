package rpc

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/metrics"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/protocols/agentpb"
)

func (a *Agent) getMetrics(ctx context.Context, _ *agentpb.GetMetricsRequest) (*agentpb.Metrics, error) {
	var text metrics.Text
	text.Family("directvol_agent_info", metrics.Gauge, "Version of this agent.")
	text.Sample("directvol_agent_info", 1, "version", a.Version)
	a.Counts.Write(&text)
	a.writeVolumes(ctx, &text)
	if err := metrics.WriteProcess(&text); err != nil {
		return nil, err
	}
	return &agentpb.Metrics{Metrics: text.String()}, nil
}

// condition is the part of a health.Condition that is counted.
type condition struct {
	status health.Status
	reason string
}

// statusNames are the names in CSI 1.13.
var statusNames = map[health.Status]string{health.Degraded: "DEGRADED", health.Inaccessible: "INACCESSIBLE", health.DataLoss: "DATA_LOSS"}

func (a *Agent) writeVolumes(ctx context.Context, text *metrics.Text) {
	mounted := a.Storages.Mounted()
	const volumes = "directvol_agent_volumes"
	text.Family(volumes, metrics.Gauge, "Storages that this agent has mounted, by driver.")
	for _, driver := range storage.Drivers() {
		n := 0
		for _, m := range mounted {
			if m.Driver == driver {
				n++
			}
		}
		text.Sample(volumes, float64(n), "driver", driver)
	}
	abnormal, counts := a.conditions(ctx, mounted)
	text.One("directvol_agent_volumes_abnormal", metrics.Gauge, "Mounted storages with at least one abnormal condition.", float64(abnormal))
	const conditions = "directvol_agent_volume_conditions"
	text.Family(conditions, metrics.Gauge, "Abnormal conditions of mounted storages, by status and reason.")
	found := slices.SortedFunc(maps.Keys(counts), func(a, b condition) int {
		return cmp.Or(cmp.Compare(a.status, b.status), cmp.Compare(a.reason, b.reason))
	})
	for _, c := range found {
		text.Sample(conditions, float64(counts[c]), "status", statusNames[c.status], "reason", c.reason)
	}
}

// conditions counts the volumes that have a condition, and the conditions.
func (a *Agent) conditions(ctx context.Context, mounted []storage.Mount) (abnormal int, counts map[condition]int) {
	var paths []string
	for _, m := range mounted {
		paths = append(paths, m.MountPoint)
	}
	counts = map[condition]int{}
	for _, conditions := range a.Volumes.Conditions(ctx, paths) {
		if len(conditions) > 0 {
			abnormal++
		}
		for _, c := range conditions {
			counts[condition{c.Status, c.Reason}]++
		}
	}
	return abnormal, counts
}
