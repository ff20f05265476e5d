package agentclient

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
)

// Bounds of an answer. Each is far above the needs of an honest answer.
const (
	maxText   = 4 << 10 // bytes
	maxUsages = 16
	maxNames  = 64

	maxConditions = 16
	maxVolumes    = 1 << 10
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
	return checkConditions(health.Conditions)
}

func checkConditions(conditions []*volumepb.Condition) error {
	if len(conditions) > maxConditions {
		return fmt.Errorf("%d conditions, at most %d are valid", len(conditions), maxConditions)
	}
	for i, c := range conditions {
		if c == nil || c.Status < volumepb.Condition_DEGRADED || c.Status > volumepb.Condition_DATA_LOSS || c.Reason == "" {
			return fmt.Errorf("condition %d is %v: its status or its reason is unknown", i, c)
		}
		if err := checkTexts(&c.Reason, &c.Message); err != nil {
			return fmt.Errorf("condition %d: %w", i, err)
		}
	}
	return nil
}

func checkVolumes(list *volumepb.ListVolumesResponse) error {
	if len(list.Volumes) > maxVolumes {
		return fmt.Errorf("%d volumes, at most %d are valid", len(list.Volumes), maxVolumes)
	}
	for i, v := range list.Volumes {
		if err := checkVolume(v); err != nil {
			return fmt.Errorf("volume %d: %w", i, err)
		}
	}
	return nil
}

// checkVolume refuses a volume without an absolute path, because no caller could name it. The bytes
// of a path need not be UTF-8, and are made printable in any case.
func checkVolume(v *volumepb.Volume) error {
	switch {
	case v == nil:
		return errors.New("it is missing")
	case !strings.HasPrefix(v.VolumeGuestPath, "/") || len(v.VolumeGuestPath) > maxText:
		return fmt.Errorf("its path %.80q is not absolute, or is longer than %d bytes", v.VolumeGuestPath, maxText)
	case len(v.Devices) > maxNames:
		return fmt.Errorf("%d devices, at most %d are valid", len(v.Devices), maxNames)
	case max(v.DeviceBytes, v.FilesystemBytes) > math.MaxInt64:
		return fmt.Errorf("it has %d bytes on a device of %d", v.FilesystemBytes, v.DeviceBytes)
	}
	v.VolumeGuestPath = printable(v.VolumeGuestPath)
	texts := []*string{&v.Filesystem}
	for i := range v.Devices {
		texts = append(texts, &v.Devices[i])
	}
	if err := checkTexts(texts...); err != nil {
		return err
	}
	if v.Growth != nil {
		if err := checkProgress(v.Growth); err != nil {
			return err
		}
	}
	return checkConditions(v.Conditions)
}

// checkEvent refuses an event of an unknown type, and one that lacks its volume. Events that are
// about no volume lose theirs.
func checkEvent(e *volumepb.VolumeEvent) error {
	switch e.Type {
	case volumepb.VolumeEvent_ADDED, volumepb.VolumeEvent_CHANGED, volumepb.VolumeEvent_REMOVED:
		return checkVolume(e.Volume)
	case volumepb.VolumeEvent_RESYNC, volumepb.VolumeEvent_RESYNCED:
		e.Volume = nil
		return nil
	}
	return fmt.Errorf("an event of type %d, which is unknown", e.Type)
}

func checkProgress(p *volumepb.GrowVolumeProgress) error {
	if max(p.From, p.Now, p.Goal) > math.MaxInt64 {
		return fmt.Errorf("a growth from %d to %d bytes that is at %d", p.From, p.Goal, p.Now)
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
