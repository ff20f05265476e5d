package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/protocols/volumepb"
)

// leastPath is how many characters of a path stay in a narrow terminal.
const leastPath = 16

// barWidth is the width of a growth's bar.
const barWidth = 10

// table is the set of volumes that the events of a watch describe.
type table struct {
	volumes map[string]*volumepb.Volume // by path
	added   map[string]bool             // since the last RESYNC; nil after RESYNCED
}

func newTable() *table {
	return &table{volumes: map[string]*volumepb.Volume{}, added: map[string]bool{}}
}

// apply changes the table by an event, and reports whether it is to be shown: while all volumes are
// sent, it is not complete.
func (t *table) apply(e *volumepb.VolumeEvent) (complete bool) {
	switch e.Type {
	case volumepb.VolumeEvent_ADDED, volumepb.VolumeEvent_CHANGED:
		t.volumes[e.Volume.VolumeGuestPath] = e.Volume
		if t.added != nil {
			t.added[e.Volume.VolumeGuestPath] = true
		}
	case volumepb.VolumeEvent_REMOVED:
		delete(t.volumes, e.Volume.VolumeGuestPath)
	case volumepb.VolumeEvent_RESYNC:
		t.added = map[string]bool{}
	case volumepb.VolumeEvent_RESYNCED:
		maps.DeleteFunc(t.volumes, func(path string, _ *volumepb.Volume) bool { return !t.added[path] })
		t.added = nil
	}
	return t.added == nil
}

// lines returns the table as lines of a terminal, sorted by path. A path is cut on its left if the
// lines are too wide.
func (t *table) lines(columns int) []string {
	if len(t.volumes) == 0 {
		return []string{"no volume is mounted"}
	}
	rows := [][]string{{"VOLUME", "FILESYSTEM", "SIZE", "GROWTH", "CONDITIONS"}}
	for _, path := range slices.Sorted(maps.Keys(t.volumes)) {
		v := t.volumes[path]
		var reasons []string
		for _, c := range v.Conditions {
			reasons = append(reasons, c.Status.String()+" "+c.Reason)
		}
		if reasons == nil {
			reasons = []string{"healthy"}
		}
		rows = append(rows, []string{path, kind(v), size(v).String(), bar(v.Growth), strings.Join(reasons, ", ")})
	}
	lines := aligned(rows)
	if excess := len([]rune(slices.MaxFunc(lines, byWidth))) - columns; excess > 0 {
		longest := len([]rune(slices.MaxFunc(slices.Sorted(maps.Keys(t.volumes)), byWidth)))
		for _, row := range rows[1:] {
			row[0] = ending(row[0], max(longest-excess, leastPath))
		}
		lines = aligned(rows)
	}
	return lines
}

func byWidth(a, b string) int { return len([]rune(a)) - len([]rune(b)) }

func aligned(rows [][]string) []string {
	var text strings.Builder
	table := output.Table(&text)
	for _, row := range rows {
		fmt.Fprintln(table, strings.Join(row, "\t"))
	}
	table.Flush()
	return strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")
}

// ending returns the last characters of a text that is longer than that.
func ending(text string, characters int) string {
	runes := []rune(text)
	if len(runes) <= characters {
		return text
	}
	return "…" + string(runes[len(runes)-characters+1:])
}

// kind returns a volume's filesystem, with what is unusual about the mount.
func kind(v *volumepb.Volume) string {
	text := v.Filesystem
	if v.ReadOnly {
		text += ", read-only"
	}
	if v.Frozen {
		text += ", frozen"
	}
	return text
}

// size is the filesystem's size, or its device's as long as the agent has not seen the
// filesystem's.
func size(v *volumepb.Volume) output.Size {
	if v.FilesystemBytes > 0 {
		return output.Size(v.FilesystemBytes)
	}
	return output.Size(v.DeviceBytes)
}

// percent returns how far a growth is.
func percent(g *volumepb.GrowVolumeProgress) int {
	switch {
	case g.Now >= g.Goal:
		return 100
	case g.Now <= g.From:
		return 0
	}
	return int(float64(g.Now-g.From) / float64(g.Goal-g.From) * 100)
}

// bar returns a growth for the table; "" if there is none.
func bar(g *volumepb.GrowVolumeProgress) string {
	if g == nil {
		return ""
	}
	full := percent(g) * barWidth / 100
	return fmt.Sprintf("[%s%s] %3d%% to %v", strings.Repeat("#", full), strings.Repeat("-", barWidth-full), percent(g), output.Size(g.Goal))
}

// eventLine returns an event as a line of a log.
func eventLine(e *volumepb.VolumeEvent) string {
	switch e.Type {
	case volumepb.VolumeEvent_RESYNC:
		return "resync: events were lost, all volumes follow"
	case volumepb.VolumeEvent_RESYNCED:
		return "resynced: these are all volumes"
	case volumepb.VolumeEvent_REMOVED:
		return "removed " + e.Volume.VolumeGuestPath
	}
	v := e.Volume
	line := fmt.Sprintf("%s %s: %s, %v", strings.ToLower(e.Type.String()), v.VolumeGuestPath, kind(v), size(v))
	if g := v.Growth; g != nil {
		line += fmt.Sprintf(", grows from %v to %v: %d%%", output.Size(g.From), output.Size(g.Goal), percent(g))
	}
	if len(v.Conditions) == 0 {
		return line + ", healthy"
	}
	for _, c := range v.Conditions {
		line += fmt.Sprintf("; %v %s: %s", c.Status, c.Reason, c.Message)
	}
	return line
}
