package killed

import (
	"errors"
	"fmt"
	"strings"
)

// count holds the results of the rounds that killed one part.
type count struct {
	rounds, kills, failed, idle int // idle: no call was in flight
	blocks                      uint64
	growths, rescued, ordered   int
	lost, left                  int
	inFlight                    map[call]int
}

// counts are the results for all parts.
type counts map[target]*count

func (r *round) blocks() (n uint64) {
	for _, v := range r.volumes {
		n += v.blocks()
	}
	return n
}

func (r *round) growths() (n int) {
	for _, v := range r.volumes {
		n += v.growths
	}
	return n
}

// add counts a round.
func (c counts) add(r *round, err error) {
	n := c[r.target]
	if n == nil {
		n = &count{inFlight: map[call]int{}}
		c[r.target] = n
	}
	n.rounds++
	n.kills += r.kills
	n.blocks += r.blocks()
	n.growths += r.growths()
	n.rescued += r.rescued
	n.left += len(r.left)
	if r.ordered {
		n.ordered++
	}
	if len(r.cut) == 0 {
		n.idle++
	}
	for _, f := range r.cut {
		n.inFlight[f.Call]++
	}
	switch {
	case errors.Is(err, errLost):
		n.lost++
	case err != nil:
		n.failed++
	}
}

// table returns all parts and their sum, as Markdown.
func (c counts) table() string {
	var b strings.Builder
	b.WriteString("| killed | rounds | kills | during no call |")
	for _, call := range awaited[1:] {
		fmt.Fprintf(&b, " %s |", call)
	}
	b.WriteString(" blocks acknowledged | growths | rescued | stopped in order | lost | left behind | failed otherwise |\n|---" + strings.Repeat("|---:", len(awaited)+9) + "|\n")
	all := &count{inFlight: map[call]int{}}
	for _, t := range targets {
		n := c[t]
		if n == nil {
			continue
		}
		n.write(&b, string(t))
		all.sum(n)
	}
	all.write(&b, "all")
	return b.String()
}

func (c *count) sum(n *count) {
	c.rounds += n.rounds
	c.kills += n.kills
	c.failed += n.failed
	c.idle += n.idle
	c.blocks += n.blocks
	c.growths += n.growths
	c.rescued += n.rescued
	c.ordered += n.ordered
	c.lost += n.lost
	c.left += n.left
	for call, times := range n.inFlight {
		c.inFlight[call] += times
	}
}

func (c *count) write(b *strings.Builder, name string) {
	fmt.Fprintf(b, "| %s | %d | %d | %d |", name, c.rounds, c.kills, c.idle)
	for _, call := range awaited[1:] {
		fmt.Fprintf(b, " %d |", c.inFlight[call])
	}
	fmt.Fprintf(b, " %d | %d | %d | %d | %d | %d | %d |\n", c.blocks, c.growths, c.rescued, c.ordered, c.lost, c.left, c.failed)
}

// report returns the results of a campaign, as Markdown.
func (c *campaign) report() string {
	return fmt.Sprintf("Formats %s, seeds %d to %d.\n\n%s", c.set, c.seed, c.seed+uint64(c.count)-1, c.counts.table())
}
