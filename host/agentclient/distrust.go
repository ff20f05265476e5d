package agentclient

import (
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
)

// Bounds of an answer. Each is far above the needs of an honest answer.
const (
	maxText   = 4 << 10 // bytes
	maxUsages = 16
	maxNames  = 64

	maxConditions = 64
)

func checkVersion(v *agentpb.VersionCheckResponse) error {
	return checkTexts(&v.GrpcVersion, &v.AgentVersion)
}

func checkStats(stats *agentpb.VolumeStatsResponse) error {
	if len(stats.Usage) > maxUsages {
		return fmt.Errorf("%d usages, at most %d are valid", len(stats.Usage), maxUsages)
	}
	for i, u := range stats.Usage {
		switch {
		case u.Unit != agentpb.VolumeUsage_BYTES && u.Unit != agentpb.VolumeUsage_INODES:
			return fmt.Errorf("usage %d has unit %d, neither bytes nor inodes", i, u.Unit)
		case u.Total > math.MaxInt64: // CSI counts in int64.
			return fmt.Errorf("usage %d has a total of %d", i, u.Total)
		case u.Available > u.Total || u.Used > u.Total:
			return fmt.Errorf("usage %d has %d available and %d used of %d", i, u.Available, u.Used, u.Total)
		}
	}
	if stats.VolumeCondition == nil {
		return nil
	}
	return checkTexts(&stats.VolumeCondition.Message)
}

// checkHealth refuses a list that is longer than an honest agent's, and a condition without a known
// status or without a reason, because no caller could act on such a condition.
func checkHealth(health *volumepb.GetVolumeHealthResponse) error {
	if len(health.Conditions) > maxConditions {
		return fmt.Errorf("%d conditions, at most %d are valid", len(health.Conditions), maxConditions)
	}
	for i, c := range health.Conditions {
		if c == nil || c.Status < volumepb.Condition_DEGRADED || c.Status > volumepb.Condition_DATA_LOSS || c.Reason == "" {
			return fmt.Errorf("condition %d is %v: its status or its reason is unknown", i, c)
		}
		if err := checkTexts(&c.Reason, &c.Message); err != nil {
			return fmt.Errorf("condition %d: %w", i, err)
		}
	}
	return nil
}

func checkDetails(details *agentpb.GuestDetailsResponse) error {
	agent := details.AgentDetails
	if agent == nil {
		return nil
	}
	texts := []*string{&agent.Version}
	for _, names := range [][]string{agent.DeviceHandlers, agent.StorageHandlers, agent.ExtraFeatures} {
		if len(names) > maxNames {
			return fmt.Errorf("a list of %d names, at most %d are valid", len(names), maxNames)
		}
		for i := range names {
			texts = append(texts, &names[i])
		}
	}
	return checkTexts(texts...)
}

// checkTexts refuses a text that is too long or not UTF-8, and makes the other texts printable.
func checkTexts(texts ...*string) error {
	for _, text := range texts {
		if len(*text) > maxText {
			return fmt.Errorf("a text of %d bytes, at most %d are valid", len(*text), maxText)
		}
		if !utf8.ValidString(*text) {
			return fmt.Errorf("%.80q is not UTF-8", *text)
		}
		*text = printable(*text)
	}
	return nil
}
