package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/tests/vm"
)

// Report is the demo's result, for programs. Sizes are in bytes, as the guest's kernel reports
// them.
type Report struct {
	OK       bool            `json:"ok"`
	Error    string          `json:"error,omitempty"`
	Seconds  float64         `json:"seconds"`
	Versions Versions        `json:"versions"`
	Steps    []Step          `json:"steps"`
	Volumes  []*VolumeReport `json:"volumes"`
}

// Versions are the versions of the programs that took part.
type Versions struct {
	Kernel string `json:"kernel"`
	QEMU   string `json:"qemu"`
	Agent  string `json:"agent"`
}

// Step is one step of the demo and its duration.
type Step struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
}

// VolumeReport is the result for one volume.
type VolumeReport struct {
	FSType            string         `json:"fstype"`
	Device            string         `json:"device"`
	DeviceBytesBefore uint64         `json:"device_bytes_before"`
	DeviceBytesAfter  uint64         `json:"device_bytes_after"`
	FSBytesBefore     uint64         `json:"fs_bytes_before"`
	FSBytesAfter      uint64         `json:"fs_bytes_after"`
	VerifiedBytes     uint64         `json:"verified_bytes"` // acknowledged, read back and equal
	Stats             []output.Usage `json:"stats"`          // of the last answer
	ConditionsBefore  []Condition    `json:"conditions_before"`
	ConditionsFault   []Condition    `json:"conditions_fault"`
	ConditionsAfter   []Condition    `json:"conditions_after"`
	SecondsToAbnormal float64        `json:"seconds_to_abnormal"` // from the fault to the first abnormal answer
	Fsck              *vm.Fsck       `json:"fsck"`                // null until fsck has run
}

// newVolumeReport returns an empty report of a volume.
func newVolumeReport(fstype string) *VolumeReport {
	return &VolumeReport{FSType: fstype, Stats: []output.Usage{}, ConditionsBefore: []Condition{}, ConditionsFault: []Condition{}, ConditionsAfter: []Condition{}}
}

// Condition is one abnormal condition of a volume.
type Condition struct {
	Abnormal bool   `json:"abnormal"`
	Message  string `json:"message"`
}

func usages(stats *agentpb.VolumeStatsResponse) []output.Usage {
	all := []output.Usage{}
	for _, u := range stats.Usage {
		all = append(all, output.Usage{Unit: u.Unit.String(), Total: u.Total, Used: u.Used, Available: u.Available})
	}
	return all
}

func conditions(stats *agentpb.VolumeStatsResponse) []Condition {
	if c := stats.VolumeCondition; c.Abnormal {
		return []Condition{{true, c.Message}}
	}
	return []Condition{}
}

func (r *Report) write(path string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return output.WriteFile(path, append(text, '\n'))
}

// summary prints the table at the end.
func (r *Report) summary(w io.Writer) {
	fmt.Fprintf(w, "\nAll checks passed, in %.0f s.\n\n", r.Seconds)
	table := output.Table(w)
	row := func(name string, cell func(*VolumeReport) string) {
		cells := []string{name}
		for _, v := range r.Volumes {
			cells = append(cells, cell(v))
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	row("filesystem", func(v *VolumeReport) string { return v.FSType })
	row("device in the guest", func(v *VolumeReport) string { return v.Device })
	row("device, before → after", func(v *VolumeReport) string { return change(v.DeviceBytesBefore, v.DeviceBytesAfter) })
	row("filesystem, before → after", func(v *VolumeReport) string { return change(v.FSBytesBefore, v.FSBytesAfter) })
	row("acknowledged, read back, equal", func(v *VolumeReport) string { return output.Size(v.VerifiedBytes).String() })
	row("fault → abnormal", func(v *VolumeReport) string { return fmt.Sprintf("%.1f s", v.SecondsToAbnormal) })
	row("healthy before, after", func(v *VolumeReport) string {
		return fmt.Sprintf("%v, %v", len(v.ConditionsBefore) == 0, len(v.ConditionsAfter) == 0)
	})
	row("fsck on the host", func(v *VolumeReport) string {
		program, _, _ := strings.Cut(v.Fsck.Command, " /")
		return fmt.Sprintf("%s: exit %d", program, v.Fsck.Exit)
	})
	table.Flush()
}

// change describes the change of a size.
func change(before, after uint64) string {
	return fmt.Sprintf("%v → %v", output.Size(before), output.Size(after))
}

func trim(text []byte) string { return strings.TrimSpace(string(text)) }
