package main

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Programs read the report: its fields may become more, and keep their names.
func TestReportHasEveryField(t *testing.T) {
	path := filepath.Join(t.TempDir(), "demo.json")
	r := Report{Error: "the reason", Steps: []Step{{}}, Volumes: []*VolumeReport{newVolumeReport("ext4")}}
	r.Volumes[0].ConditionsFault = []Condition{{Abnormal: true}}
	if err := r.write(path); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var report map[string]any
	if err := json.Unmarshal(text, &report); err != nil {
		t.Fatal(err)
	}
	first := func(of map[string]any, list string) map[string]any { return of[list].([]any)[0].(map[string]any) }
	volume := first(report, "volumes")
	for want, object := range map[string]map[string]any{
		"error ok seconds steps versions volumes": report,
		"agent kernel qemu":                       report["versions"].(map[string]any),
		"name seconds":                            first(report, "steps"),
		"abnormal message":                        first(volume, "conditions_fault"),
		"conditions_after conditions_before conditions_fault device device_bytes_after device_bytes_before fs_bytes_after fs_bytes_before fsck fstype seconds_to_abnormal stats verified_bytes": volume,
	} {
		if got := slices.Sorted(maps.Keys(object)); strings.Join(got, " ") != want {
			t.Errorf("want %s\ngot  %s", want, strings.Join(got, " "))
		}
	}
}
