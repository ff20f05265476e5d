package trial

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/directvol/directvol/host/trial/trialtest"
)

// TestStoreWhoseTrialIsLostIsNotSaidToFail: the process that starts the trials is killed while one waits for a store that hangs.
func TestStoreWhoseTrialIsLostIsNotSaidToFail(t *testing.T) {
	s, err := current()
	if err != nil {
		t.Fatal(err)
	}
	path, stop, answer := trialtest.Serve(t)
	defer answer()
	stop()
	var trials Trials
	waits, _ := trials.start(path, time.Hour)
	if err := trials.Read(t.Context(), os.DevNull+"/none", time.Hour); err == nil { // behind the one that waits
		t.Error("a store that is not there answers")
	}
	s.end.Close() // it ends then, as when it is killed
	<-waits.ended
	if !errors.Is(waits.err, ErrUntried) {
		t.Errorf("whom its end met\nwant %v\ngot  %v", ErrUntried, waits.err)
	}
	if err := trials.Read(t.Context(), os.DevNull+"/none", time.Minute); err == nil || errors.Is(err, ErrUntried) {
		t.Errorf("the next store, which is not there\nwant its own error\ngot  %v", err)
	}
}
