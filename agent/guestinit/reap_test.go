package guestinit

import (
	"os"
	"strconv"
	"testing"
)

// Reap lasts as long as the process, so both cases are in one test.
func TestStarterGetsTheStatusOfItsProcessBesideTheReaper(t *testing.T) {
	for _, reaped := range []bool{false, true} {
		if reaped {
			Reap()
		}
		for range 20 {
			process, ended, err := Start("/bin/sh", []string{"sh", "-c", "exit 7"}, &os.ProcAttr{})
			if err != nil {
				t.Fatal(err)
			}
			if status := <-ended; !status.Exited() || status.ExitStatus() != 7 {
				t.Errorf("reaped: %v\nwant exit 7\ngot  %#x", reaped, status)
			}
			if _, err := os.Stat("/proc/" + strconv.Itoa(process.Pid)); err == nil {
				t.Errorf("reaped: %v: process %d is still there", reaped, process.Pid)
			}
		}
		if _, _, err := Start("/no/such/program", nil, &os.ProcAttr{}); !os.IsNotExist(err) {
			t.Errorf("want an error that it does not exist\ngot  %v", err)
		}
	}
}
