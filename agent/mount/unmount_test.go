package mount

import (
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// A statfs for statistics has a mount in use for a moment: Unmount must not report that as EBUSY.
func TestMountThatIsInUseForAMomentIsNotBusy(t *testing.T) {
	for name, test := range map[string]struct {
		answers []error // the last one is repeated forever
		want    error
		tries   int
	}{
		"in use by nobody":    {[]error{nil}, nil, 1},
		"for a moment":        {[]error{unix.EBUSY, unix.EBUSY, nil}, nil, 3},
		"for longer":          {[]error{unix.EBUSY}, unix.EBUSY, busyTries},
		"something else":      {[]error{unix.EINVAL}, unix.EINVAL, 1},
		"idle, and marked so": {[]error{unix.EBUSY, unix.EAGAIN}, unix.EAGAIN, 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			tries, began := 0, time.Now()
			err := unlessBusy(func() error {
				tries++
				return test.answers[min(tries, len(test.answers))-1]
			})
			if err != test.want || tries != test.tries {
				t.Errorf("%s\nwant %v after %d tries\ngot  %v after %d", name, test.want, test.tries, err, tries)
			}
			if want, took := time.Duration(test.tries-1)*busyPause, time.Since(began); took != want {
				t.Errorf("%s\nwant it to take %v\ngot  %v", name, want, took)
			}
		})
	}
}
