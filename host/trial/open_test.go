package trial

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/directvol/directvol/host/trial/trialtest"
)

// openHanging opens a store, which hangs until answer is called or the test ends.
func openHanging(t *testing.T) (answer func()) {
	t.Helper()
	path, stop, answer := trialtest.Serve(t)
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		answer() // a file of a store that hangs cannot be closed
		file.Close()
	})
	stop()
	return answer
}

// A new process closes the descriptors that it inherited before it runs.
func TestOpenHungStoreDelaysNoTrialOfAnother(t *testing.T) {
	if err := Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	openHanging(t)
	fine := filepath.Join(t.TempDir(), "fine")
	if err := os.WriteFile(fine, make([]byte, pageBytes), 0o600); err != nil {
		t.Fatal(err)
	}
	var trials Trials
	if err := trials.Read(t.Context(), fine, 10*time.Second); err != nil {
		t.Errorf("a store that answers: %v", err)
	}
}

// When the starter has ended, the next trial must start another one.
func TestTrialsOutliveTheirStarter(t *testing.T) {
	fine := filepath.Join(t.TempDir(), "fine")
	if err := os.WriteFile(fine, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := current(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	hung, _ := leased(t)
	var trials Trials
	waits, _ := trials.start(hung, time.Hour)
	if err := trials.Read(t.Context(), fine, time.Hour); err != nil { // comes after the order that waits
		t.Error(err)
	}
	s.end.Close()
	<-waits.ended
	if waits.err == nil {
		t.Error("a trial whose process was ended says that the store answers")
	}
	if err := trials.Read(t.Context(), fine, time.Hour); err != nil {
		t.Error(err)
	}
}
