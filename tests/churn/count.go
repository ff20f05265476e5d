package churn

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
)

// maxWrong is the maximum number of broken promises that are kept.
const maxWrong = 20

// count counts the calls and their results.
type count struct {
	mu     sync.Mutex
	calls  map[string]map[string]int // by call and kind of answer
	broken []string
	wrongs int
}

func (c *count) add(call string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls == nil {
		c.calls = map[string]map[string]int{}
	}
	if c.calls[call] == nil {
		c.calls[call] = map[string]int{}
	}
	c.calls[call][kind(err)]++
}

// wrong records a broken promise.
func (c *count) wrong(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wrongs++
	if len(c.broken) < maxWrong {
		c.broken = append(c.broken, fmt.Sprintf(format, args...))
	}
}

// String returns a line for each kind of call.
func (c *count) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var text strings.Builder
	all := 0
	for _, call := range slices.Sorted(maps.Keys(c.calls)) {
		fmt.Fprintf(&text, "%-16s", call)
		for _, kind := range slices.Sorted(maps.Keys(c.calls[call])) {
			all += c.calls[call][kind]
			fmt.Fprintf(&text, "  %d %s", c.calls[call][kind], kind)
		}
		text.WriteByte('\n')
	}
	return fmt.Sprintf("%d in all, %d promises broken\n%s", all, c.wrongs, text.String())
}
