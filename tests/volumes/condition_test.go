package volumes

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/vm"
)

// Conditions, as a program tests for them.
var (
	hung        = is(volumepb.Condition_INACCESSIBLE, "IOHung")
	slow        = is(volumepb.Condition_DEGRADED, "IOSlow")
	failedOnce  = is(volumepb.Condition_DEGRADED, "PastIOError")
	readsFailed = is(volumepb.Condition_DEGRADED, "ReadError")
	hasShutDown = is(volumepb.Condition_INACCESSIBLE, "Shutdown")
	stopped     = is(volumepb.Condition_INACCESSIBLE, "ReadOnly")
	failsWrites = is(volumepb.Condition_INACCESSIBLE, "IOError")
	isGone      = is(volumepb.Condition_INACCESSIBLE, "DeviceGone")
	isTooSmall  = is(volumepb.Condition_INACCESSIBLE, "DeviceTooSmall")
	wasTooSmall = is(volumepb.Condition_DEGRADED, "PastDeviceTooSmall")
	hasErrors   = is(volumepb.Condition_DEGRADED, "RecordedErrors")
	isFull      = is(volumepb.Condition_DEGRADED, "OutOfSpace")
)

type conditions []*volumepb.Condition

func (all conditions) String() string {
	var text []string
	for _, c := range all {
		text = append(text, fmt.Sprintf("%v %s: %s", c.Status, c.Reason, c.Message))
	}
	return strings.Join(text, "; ")
}

// is accepts conditions that include one with a status and a reason.
func is(status volumepb.Condition_Status, reason string) func([]*volumepb.Condition) bool {
	return func(all []*volumepb.Condition) bool {
		return slices.ContainsFunc(all, func(c *volumepb.Condition) bool { return c.Status == status && c.Reason == reason })
	}
}

func nothing(all []*volumepb.Condition) bool { return len(all) == 0 }

func inaccessible(all []*volumepb.Condition) bool { return !accessible(all) }

// accessible accepts the conditions of a volume that can still be used.
func accessible(all []*volumepb.Condition) bool {
	return !slices.ContainsFunc(all, func(c *volumepb.Condition) bool { return c.Status != volumepb.Condition_DEGRADED })
}

// becomes waits until wanted accepts a volume's conditions, and logs the duration.
func becomes(t *testing.T, v *vm.Volume, wanted func([]*volumepb.Condition) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), shownBy)
	defer cancel()
	began := time.Now()
	found, err := v.AwaitHealth(ctx, wanted)
	if err != nil {
		now, _ := v.Health(limited(t))
		t.Fatalf("%v: %v", err, conditions(now))
	}
	t.Logf("%s after %v: %v", v.ID, time.Since(began).Round(10*time.Millisecond), conditions(found))
}
