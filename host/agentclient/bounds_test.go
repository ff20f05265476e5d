package agentclient

import (
	"strings"
	"testing"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
)

// Each list and each text of an answer may be as long as its bound, and no longer.
func TestListsAndTextsOfAnswersHaveBounds(t *testing.T) {
	repeat := func(n int) (names []string, usages []*agentpb.VolumeUsage, conditions []*volumepb.Condition) {
		for range n {
			names = append(names, "name")
			usages = append(usages, &agentpb.VolumeUsage{Unit: agentpb.VolumeUsage_BYTES})
			conditions = append(conditions, &volumepb.Condition{Status: volumepb.Condition_DEGRADED, Reason: "IOSlow"})
		}
		return names, usages, conditions
	}
	for name, test := range map[string]struct {
		bound int
		check func(n int) error
	}{
		"usages": {maxUsages, func(n int) error {
			_, usages, _ := repeat(n)
			return checkStats(&agentpb.VolumeStatsResponse{Usage: usages})
		}},
		"conditions": {maxConditions, func(n int) error {
			_, _, conditions := repeat(n)
			return checkHealth(&volumepb.GetVolumeHealthResponse{Conditions: conditions})
		}},
		"volumes": {maxVolumes, func(n int) error {
			list := &volumepb.ListVolumesResponse{}
			for range n {
				list.Volumes = append(list.Volumes, &volumepb.Volume{VolumeGuestPath: "/v"})
			}
			return checkVolumes(list)
		}},
		"devices": {maxNames, func(n int) error {
			names, _, _ := repeat(n)
			return checkVolume(&volumepb.Volume{VolumeGuestPath: "/v", Devices: names})
		}},
		"bytes of a path": {maxText, func(n int) error {
			return checkVolume(&volumepb.Volume{VolumeGuestPath: "/" + strings.Repeat("x", n-1)})
		}},
		"names": {maxNames, func(n int) error {
			names, _, _ := repeat(n)
			return checkDetails(&agentpb.GuestDetailsResponse{AgentDetails: &agentpb.AgentDetails{StorageHandlers: names}})
		}},
		"a text": {maxText, func(n int) error {
			return checkDetails(&agentpb.GuestDetailsResponse{AgentDetails: &agentpb.AgentDetails{Version: strings.Repeat("x", n)}})
		}},
	} {
		if err := test.check(test.bound); err != nil {
			t.Errorf("%d of %s\nwant it taken\ngot  %v", test.bound, name, err)
		}
		if err := test.check(test.bound + 1); err == nil {
			t.Errorf("%d of %s\nwant it refused", test.bound+1, name)
		}
	}
}

func TestConditionThatNobodyCouldActOnIsRefused(t *testing.T) {
	for name, lie := range map[string]*volumepb.Condition{
		"none":             nil,
		"without a status": {Reason: "IOSlow"},
		"a later status":   {Status: volumepb.Condition_DATA_LOSS + 1, Reason: "IOSlow"},
		"without a reason": {Status: volumepb.Condition_DEGRADED},
		"a long message":   {Status: volumepb.Condition_DEGRADED, Reason: "IOSlow", Message: strings.Repeat("x", maxText+1)},
	} {
		if err := checkHealth(&volumepb.GetVolumeHealthResponse{Conditions: []*volumepb.Condition{lie}}); err == nil {
			t.Errorf("%s: want it refused", name)
		}
	}
}
