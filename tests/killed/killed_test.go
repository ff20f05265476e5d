package killed

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/directvol/directvol/tests/vm"
)

func TestMain(m *testing.M) {
	if os.Getenv(asHost) == "" {
		os.Exit(m.Run())
	}
	if err := serveHost(stdio{os.Stdin, os.Stdout}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func TestKillOfEachPartLosesNothing(t *testing.T) { runCampaign(t, len(targets), targets, "usual") }

// runCampaign makes the given number of rounds, unless the environment sets another.
func runCampaign(t *testing.T, count int, only []target, set string) *campaign {
	t.Helper()
	s, err := fromEnvironment(count, only, set)
	if err != nil {
		t.Fatal(err)
	}
	build, err := vm.FindBuild()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d rounds, formats %s, seeds from %d on", s.count, s.set, s.seed)
	c := &campaign{settings: s, keep: filepath.Join(build.Dir, "killed"), say: t.Logf}
	err = c.run(t.Context())
	t.Logf("\n%s", c.report())
	for _, text := range c.failures {
		t.Error(text)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}
