package health

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Status is the severity of a condition, with the names and numbers of volume health in CSI 1.13.
type Status int

// The statuses, from bad to worse.
const (
	Degraded     Status = 1 // it works, but something is lost or slow
	Inaccessible Status = 2 // reads or writes fail
	DataLoss     Status = 3 // loss is proven
)

// Reasons of conditions, in CamelCase as CSI requires.
const (
	ReasonDeviceGone         = "DeviceGone"
	ReasonDeviceTooSmall     = "DeviceTooSmall" // the device ends before the filesystem does
	ReasonIOHung             = "IOHung"         // requests are in flight, and none has ended for a while
	ReasonIOSlow             = "IOSlow"         // requests end, but take long
	ReasonIOError            = "IOError"
	ReasonReadOnly           = "ReadOnly"
	ReasonShutdown           = "Shutdown"
	ReasonOutOfSpace         = "OutOfSpace"
	ReasonLowSpace           = "LowSpace"  // less is available than a setting says
	ReasonLowInodes          = "LowInodes" // as LowSpace
	ReasonRecordedErrors     = "RecordedErrors"
	ReasonPastIOError        = "PastIOError"
	ReasonPastDeviceTooSmall = "PastDeviceTooSmall"
	ReasonReadError          = "ReadError"
)

// Condition is one fault of a volume. (Status, Reason) is unique among a volume's conditions; a
// healthy volume has none.
type Condition struct {
	Status  Status
	Reason  string
	Message string    // for a person who can act on it; the same as long as the condition lasts
	Since   time.Time // when a watch first had the condition, without a look at which it was gone; zero until a watch has it
}

// condition makes a condition of the target. Its message begins with the filesystem and its device.
func (t Target) condition(status Status, reason, format string, args ...any) Condition {
	return Condition{Status: status, Reason: reason, Message: fmt.Sprintf("%s on %s: ", t.FSType, t.Device.Path) + fmt.Sprintf(format, args...)}
}

// maxConditions is how many conditions a volume has at most, in CSI 1.13's words.
const maxConditions = 16

// dated returns the conditions that a volume has now, at most maxConditions and each (Status,
// Reason) once, with the time since when it has them. before are the conditions up to now.
func dated(conditions, before []Condition, now time.Time) []Condition {
	var all []Condition
	for _, c := range conditions {
		same := func(other Condition) bool { return other.Status == c.Status && other.Reason == c.Reason }
		if slices.ContainsFunc(all, same) || len(all) == maxConditions {
			continue
		}
		c.Since = now
		if i := slices.IndexFunc(before, same); i >= 0 {
			c.Since = before[i].Since
		}
		all = append(all, c)
	}
	return all
}

// untilRemount reports whether only a remount can clear the condition and nothing more can be
// learned about it. (An xfs that has shut down is not included: it may yet turn out to have lost
// its device.)
func (c Condition) untilRemount() bool {
	return c.Reason == ReasonReadOnly || c.Reason == ReasonDeviceGone
}

// Unanswered returns the conditions of a volume whose statistics could not be measured for a while.
// It adds IOSlow unless a condition already says that the disk hangs or is slow. of is the time of
// the statistics that are returned instead, or zero if there are none.
func Unanswered(conditions []Condition, fstype, mountpoint string, of time.Time) []Condition {
	if slices.ContainsFunc(conditions, func(c Condition) bool { return c.Reason == ReasonIOHung || c.Reason == ReasonIOSlow }) {
		return conditions
	}
	message := fmt.Sprintf("%s at %s: statfs has not answered", fstype, mountpoint)
	if !of.IsZero() {
		message += ": its statistics date from " + of.UTC().Format(time.RFC3339)
	}
	return append(slices.Clone(conditions), Condition{Status: Degraded, Reason: ReasonIOSlow, Message: message + "; check the path to its storage"})
}

func isInaccessible(c Condition) bool { return c.Status == Inaccessible }

// Summary converts conditions to Kata's VolumeCondition and the older CSI one: whether there are
// any, and one message, which is "OK" if there are none.
func Summary(conditions []Condition) (abnormal bool, message string) {
	if len(conditions) == 0 {
		return false, "OK"
	}
	messages := make([]string, len(conditions))
	for i, c := range conditions {
		messages[i] = c.Message
	}
	return true, strings.Join(messages, "; ")
}
