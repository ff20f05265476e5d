package metrics

import (
	"cmp"
	"maps"
	"slices"
	"sort"
)

// Agent is everything that an agent reports in its metrics.
type Agent struct {
	Version string
	Calls   *Calls   // of the calls that the agent's server has answered
	Drivers []string // of storages; each has a sample, also without a volume
	Volumes []Volume // those that are mounted
	Trimmed uint64   // bytes that trims have given back
}

// Volume is a mounted storage.
type Volume struct {
	Driver     string
	Conditions []Condition // empty means normal
}

// Condition is a fault of a volume. Both fields are from a fixed set, because they become labels.
type Condition struct{ Status, Reason string }

// Text returns the exposition of all metrics, those of this process included. Its error is that of
// reading /proc/self/status.
func (a *Agent) Text() (string, error) {
	var t Text
	t.Family("directvol_agent_info", Gauge, "Version of this agent.")
	t.Sample("directvol_agent_info", 1, "version", a.Version)
	a.Calls.Write(&t)
	a.writeVolumes(&t)
	t.One("directvol_agent_trimmed_bytes_total", Counter, "Free bytes of volumes that disks were told of by trims.", float64(a.Trimmed))
	if err := WriteProcess(&t); err != nil {
		return "", err
	}
	return t.String(), nil
}

func (a *Agent) writeVolumes(t *Text) {
	drivers, conditions, abnormal := map[string]int{}, map[Condition]int{}, 0
	for _, v := range a.Volumes {
		drivers[v.Driver]++
		if len(v.Conditions) > 0 {
			abnormal++
		}
		for _, c := range v.Conditions {
			conditions[c]++
		}
	}
	const volumesName = "directvol_agent_volumes"
	t.Family(volumesName, Gauge, "Storages that this agent has mounted, by driver.")
	for _, driver := range a.Drivers {
		t.Sample(volumesName, float64(drivers[driver]), "driver", driver)
	}
	t.One("directvol_agent_volumes_abnormal", Gauge, "Mounted storages with at least one abnormal condition.", float64(abnormal))
	const conditionsName = "directvol_agent_volume_conditions"
	t.Family(conditionsName, Gauge, "Abnormal conditions of mounted storages, by status and reason.")
	for _, c := range sorted(conditions) {
		t.Sample(conditionsName, float64(conditions[c]), "status", c.Status, "reason", c.Reason)
	}
}

func sorted(conditions map[Condition]int) []Condition {
	all := slices.Collect(maps.Keys(conditions))
	sort.Slice(all, func(i, j int) bool {
		return cmp.Or(cmp.Compare(all[i].Status, all[j].Status), cmp.Compare(all[i].Reason, all[j].Reason)) < 0
	})
	return all
}
