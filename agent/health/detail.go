package health

import (
	"fmt"
	"strings"
	"time"
)

// detail returns the counts, sizes, times and errors behind the current conditions, for the log.
// They change while a condition lasts, so they are in no condition's message: a message that
// changes would make each report look new. w.mu is held.
func (w *Watch) detail() string {
	all := append([]string(nil), w.details...)
	if w.event != "" {
		all = append(all, w.event)
	}
	if w.stall.hangs() {
		all = append(all, fmt.Sprintf("%d requests in flight", w.stall.last.inFlight))
	}
	if !w.past.Failed.IsZero() {
		all = append(all, "writes last failed at "+w.past.Failed.UTC().Format(time.RFC3339))
	}
	if !w.past.Smaller.IsZero() {
		all = append(all, "its disk was last too small at "+w.past.Smaller.UTC().Format(time.RFC3339))
	}
	if w.past.Unreadable > 0 {
		all = append(all, fmt.Sprintf("%d reads have failed, the last with %q", w.past.Unreadable, w.past.LastRead))
	}
	return strings.Join(all, "; ")
}
