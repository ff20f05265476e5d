package agentclient

import (
	"math"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
)

// FuzzAnswers parses arbitrary payloads as each kind of answer. An accepted answer must have
// bounded numbers, and texts that are safe for a log or a terminal.
func FuzzAnswers(f *testing.F) {
	for _, m := range []interface{ Marshal() ([]byte, error) }{
		&agentpb.VersionCheckResponse{GrpcVersion: "0.0.1", AgentVersion: "\x1b[2J1"},
		&agentpb.VolumeStatsResponse{
			Usage:           []*agentpb.VolumeUsage{{Unit: agentpb.VolumeUsage_BYTES, Total: 9, Used: 2, Available: 7}, {Unit: agentpb.VolumeUsage_INODES, Total: 1 << 63}, {Total: 1, Used: 2}},
			VolumeCondition: &agentpb.VolumeCondition{Abnormal: true, Message: "ext4 on /dev/vda\r\nOK\u202e"},
		},
		&volumepb.GetVolumeHealthResponse{Conditions: []*volumepb.Condition{{Status: volumepb.Condition_INACCESSIBLE, Reason: "IOHung\x07", Message: "\x1b[2J"}, {Status: 4, Reason: "x"}}},
		&volumepb.ListVolumesResponse{Volumes: []*volumepb.Volume{{VolumeGuestPath: "/a\n\xff", Filesystem: "ext4\x1b", Devices: []string{"/dev/vda\u202e"}, DeviceBytes: 9, Growth: &volumepb.GrowVolumeProgress{Goal: 9}}, {}}},
		&volumepb.VolumeEvent{Type: volumepb.VolumeEvent_ADDED, Volume: &volumepb.Volume{VolumeGuestPath: "/a", Conditions: []*volumepb.Condition{{Status: 1, Reason: "IOSlow\x07"}}}},
		&volumepb.VolumeEvent{Type: volumepb.VolumeEvent_RESYNC, Volume: &volumepb.Volume{VolumeGuestPath: "\x1b"}},
		&volumepb.GrowVolumeProgress{From: 1, Now: 1 << 63, Goal: 1 << 62, Done: true},
		&agentpb.GuestDetailsResponse{AgentDetails: &agentpb.AgentDetails{Version: "1", DeviceHandlers: []string{"blk", "\xff"}, StorageHandlers: make([]string, maxNames+1)}},
	} {
		b, err := m.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var version agentpb.VersionCheckResponse
		if version.Unmarshal(b) == nil && checkVersion(&version) == nil {
			showable(t, version.GrpcVersion, version.AgentVersion)
		}
		var stats agentpb.VolumeStatsResponse
		if stats.Unmarshal(b) == nil && checkStats(&stats) == nil {
			for _, u := range stats.Usage {
				if u.Total > math.MaxInt64 || max(u.Used, u.Available) > u.Total || len(stats.Usage) > maxUsages {
					t.Errorf("%x passed as %+v", b, stats)
				}
			}
			if stats.VolumeCondition != nil {
				showable(t, stats.VolumeCondition.Message)
			}
		}
		var health volumepb.GetVolumeHealthResponse
		if health.Unmarshal(b) == nil && checkHealth(&health) == nil {
			for _, c := range health.Conditions {
				showable(t, c.Reason, c.Message)
				if c.Status < 1 || c.Status > 3 || c.Reason == "" || len(health.Conditions) > maxConditions {
					t.Errorf("%x passed as %+v", b, health)
				}
			}
		}
		var list volumepb.ListVolumesResponse
		if list.Unmarshal(b) == nil && checkVolumes(&list) == nil {
			for _, v := range list.Volumes {
				bounded(t, b, v)
			}
			if len(list.Volumes) > maxVolumes {
				t.Errorf("%d volumes passed", len(list.Volumes))
			}
		}
		var event volumepb.VolumeEvent
		if event.Unmarshal(b) == nil && checkEvent(&event) == nil {
			hasVolume := event.Type >= volumepb.VolumeEvent_ADDED && event.Type <= volumepb.VolumeEvent_REMOVED
			if hasVolume {
				bounded(t, b, event.Volume)
			} else if event.Volume != nil || event.Type != volumepb.VolumeEvent_RESYNC && event.Type != volumepb.VolumeEvent_RESYNCED {
				t.Errorf("%x passed as %v", b, &event)
			}
		}
		var progress volumepb.GrowVolumeProgress
		if progress.Unmarshal(b) == nil && checkProgress(&progress) == nil && max(progress.From, progress.Now, progress.Goal) > math.MaxInt64 {
			t.Errorf("%x passed as %v", b, &progress)
		}
		var details agentpb.GuestDetailsResponse
		if details.Unmarshal(b) == nil && checkDetails(&details) == nil && details.AgentDetails != nil {
			showable(t, details.AgentDetails.Version)
			for _, names := range [][]string{details.AgentDetails.DeviceHandlers, details.AgentDetails.StorageHandlers, details.AgentDetails.ExtraFeatures} {
				showable(t, names...)
			}
		}
	})
}

// bounded fails unless a volume that was accepted has an absolute path, bounded numbers and texts
// that can be shown.
func bounded(t *testing.T, b []byte, v *volumepb.Volume) {
	if v == nil || !strings.HasPrefix(v.VolumeGuestPath, "/") || max(v.DeviceBytes, v.FilesystemBytes) > math.MaxInt64 || len(v.Conditions) > maxConditions {
		t.Errorf("%x passed as %v", b, v)
		return
	}
	if g := v.Growth; g != nil && max(g.From, g.Now, g.Goal) > math.MaxInt64 {
		t.Errorf("%x passed as %v", b, v)
	}
	showable(t, v.VolumeGuestPath, v.Filesystem)
	showable(t, v.Devices...)
	for _, c := range v.Conditions {
		showable(t, c.Reason, c.Message)
	}
}

func showable(t *testing.T, texts ...string) {
	if len(texts) > maxNames {
		t.Errorf("%d names, at most %d", len(texts), maxNames)
	}
	for _, text := range texts {
		if len(text) > maxText || !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("want a printable text of at most %d bytes\ngot  %q", maxText, text)
		}
	}
}
