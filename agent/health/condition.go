package health

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Status is how bad a condition is, with the names and numbers of CSI 1.13's
// volume health.
type Status int

// The statuses, from bad to worse.
const (
	Degraded     Status = 1 // it works, with a loss of something
	Inaccessible Status = 2 // reads or writes fail
	DataLoss     Status = 3 // loss is proven
)

// Reasons of conditions, in CamelCase as CSI wants them.
const (
	ReasonDeviceGone         = "DeviceGone"
	ReasonDeviceTooSmall     = "DeviceTooSmall" // it ends before the filesystem does
	ReasonIOHung             = "IOHung"         // requests are in flight, and none has ended for a while
	ReasonIOSlow             = "IOSlow"         // it answers, and takes long
	ReasonIOError            = "IOError"
	ReasonReadOnly           = "ReadOnly"
	ReasonShutdown           = "Shutdown"
	ReasonOutOfSpace         = "OutOfSpace"
	ReasonRecordedErrors     = "RecordedErrors"
	ReasonPastIOError        = "PastIOError"
	ReasonPastDeviceTooSmall = "PastDeviceTooSmall"
	ReasonReadError          = "ReadError"
)

// Condition is one thing that is wrong with a volume. (Status, Reason) is
// unique among a volume's conditions; a healthy volume has none.
type Condition struct {
	Status  Status
	Reason  string
	Message string // what a person can act on
}

// untilRemount tells that nothing but mounting again can mend it, and that
// nothing more is to be learnt of it. (An xfs that has shut down may yet turn out
// to have lost its device.)
func (c Condition) untilRemount() bool {
	return c.Reason == ReasonReadOnly || c.Reason == ReasonDeviceGone
}

// Unanswered returns the conditions of a volume whose statistics could not be measured for a
// while: with IOSlow, unless one of them says already that its disk hangs or is slow. The
// statistics that are answered instead are those of a time, or there are none (zero).
func Unanswered(conditions []Condition, fstype, mountpoint string, waited time.Duration, of time.Time) []Condition {
	if slices.ContainsFunc(conditions, func(c Condition) bool { return c.Reason == ReasonIOHung || c.Reason == ReasonIOSlow }) {
		return conditions
	}
	message := fmt.Sprintf("%s at %s: statfs has not answered", fstype, mountpoint)
	if waited > 0 {
		message += fmt.Sprintf(" for %v", waited.Round(time.Millisecond))
	}
	if !of.IsZero() {
		message += ": its statistics are those of " + of.UTC().Format(time.RFC3339)
	}
	return append(slices.Clone(conditions), Condition{Degraded, ReasonIOSlow, message + "; look at the path to its storage"})
}

func isInaccessible(c Condition) bool { return c.Status == Inaccessible }

// Summary projects conditions on Kata's VolumeCondition and the older CSI one:
// whether anything is wrong, and one message; "OK" where nothing is.
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
