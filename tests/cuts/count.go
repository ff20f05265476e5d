package cuts

import (
	"fmt"
	"slices"
	"strings"
)

// row is a row of the table.
type row struct{ fstype, kernel, kind string }

// count holds the results of a row's volumes.
type count struct {
	cuts, volumes, growths, blocks, windows, rescued int
	lost                                             map[loss]int
}

// counts are the results of all rows.
type counts map[row]*count

func (c counts) of(r row) *count {
	if c[r] == nil {
		c[r] = &count{lost: map[loss]int{}}
	}
	return c[r]
}

// volume counts one volume of a cut.
func (c *count) volume(r *remains) {
	c.volumes++
	c.growths += r.growths
	c.blocks += int(r.ledger.Blocks())
	if r.window {
		c.windows++
	}
}

// columns are the losses that have a column in the table.
var columns = []loss{metWindow, refused, blocks, noGrowth, unclean, hung, duringUse}

// table returns all rows and their sum as Markdown. A cut with volumes of several rows counts in
// each of them.
func (c counts) table() string {
	var b strings.Builder
	b.WriteString("| filesystem | kernel | cut | cuts | volumes | growths | blocks acknowledged | in the window |")
	for _, l := range columns {
		fmt.Fprintf(&b, " %s |", l)
		if l == metWindow {
			b.WriteString(" of these rescued |")
		}
	}
	b.WriteString("\n|---|---|---" + strings.Repeat("|---:", 6+len(columns)) + "|\n")
	rows := make([]row, 0, len(c))
	all := count{lost: map[loss]int{}}
	for r, n := range c {
		rows = append(rows, r)
		all.add(n)
	}
	slices.SortFunc(rows, func(a, b row) int {
		return strings.Compare(a.fstype+" "+a.kernel+" "+a.kind, b.fstype+" "+b.kernel+" "+b.kind)
	})
	for _, r := range rows {
		c[r].write(&b, r, fmt.Sprint(c[r].cuts))
	}
	all.write(&b, row{fstype: "all"}, "")
	return b.String()
}

func (c *count) add(n *count) {
	c.volumes += n.volumes
	c.growths += n.growths
	c.blocks += n.blocks
	c.windows += n.windows
	c.rescued += n.rescued
	for l, times := range n.lost {
		c.lost[l] += times
	}
}

func (c *count) write(b *strings.Builder, r row, cuts string) {
	fmt.Fprintf(b, "| %s | %s | %s | %s | %d | %d | %d | %d |", r.fstype, r.kernel, r.kind, cuts, c.volumes, c.growths, c.blocks, c.windows)
	for _, l := range columns {
		fmt.Fprintf(b, " %d |", c.lost[l])
		if l == metWindow {
			fmt.Fprintf(b, " %d |", c.rescued)
		}
	}
	b.WriteString("\n")
}
