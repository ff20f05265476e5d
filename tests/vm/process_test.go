package vm

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

func TestProcessIsFoundByItsArgumentsUntilItEnds(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	command := exec.Command("tail", "-f", file)
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	found, err := ProcessesWith(file)
	if want := []string{"tail", "-f", file}; err != nil || len(found) != 1 || found[0].ID != command.Process.Pid || !slices.Equal(found[0].Args, want) {
		t.Errorf("want %d: %v\ngot  %v, error %v", command.Process.Pid, want, found, err)
	}
	ended, err := Ending(command.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if again, err := Ending(command.Process.Pid); err != nil || again(soon) == nil {
		t.Errorf("it runs, and its end is seen (error %v)", err)
	}
	if err := command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := ended(t.Context()); err != nil { // before it is reaped
		t.Error(err)
	}
	_ = command.Wait() // it was killed
	if found, err := ProcessesWith(file); err != nil || len(found) != 0 {
		t.Errorf("want none any more\ngot  %v, error %v", found, err)
	}
}
