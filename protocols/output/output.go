// Package output formats the output of programs for people and for other programs: sizes in a
// suitable unit, tables, one JSON object per line, and progress that is updated in place. Package
// program handles command lines.
package output

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Size is a number of bytes. It prints in the largest binary unit (IEC 80000-13) in which it is at
// least one: 320.0 MiB.
type Size uint64

// String returns the size with one decimal, or in whole bytes below 1 KiB.
func (s Size) String() string {
	if s < 1<<10 {
		return fmt.Sprintf("%d bytes", uint64(s))
	}
	value, unit := float64(s)/(1<<10), 0
	const units = "KMGTPE"
	for value >= 1023.95 && unit < len(units)-1 { // larger values would round to 1024.0
		value, unit = value/(1<<10), unit+1
	}
	return fmt.Sprintf("%.1f %ciB", value, units[unit])
}

// Usage is a volume's use of one unit, such as BYTES or INODES.
type Usage struct {
	Unit      string `json:"unit"`
	Total     uint64 `json:"total"`
	Used      uint64 `json:"used"`
	Available uint64 `json:"available"` // for a user without privileges
}

// String returns all three figures; bytes are in a suitable unit.
func (u Usage) String() string {
	show := func(n uint64) string { return strconv.FormatUint(n, 10) }
	if u.Unit == "BYTES" {
		show = func(n uint64) string { return Size(n).String() }
	}
	return fmt.Sprintf("%s: total %s, used %s, available %s", strings.ToLower(u.Unit), show(u.Total), show(u.Used), show(u.Available))
}

// Answer writes a program's result to its standard output: v as one line of JSON, or text, which
// must end with a newline.
func Answer(w io.Writer, asJSON bool, v any, text string) error {
	if asJSON {
		return json.NewEncoder(w).Encode(v)
	}
	_, err := fmt.Fprint(w, text)
	return err
}

// Table aligns tab-terminated cells in columns. The caller must flush it.
func Table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }
