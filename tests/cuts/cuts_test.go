package cuts

import (
	"path/filepath"
	"testing"

	"github.com/directvol/directvol/tests/vm"
)

func TestTwentyCutsLoseNothing(t *testing.T) { runCampaign(t, 20) }

// runCampaign makes the given number of cuts, unless the environment sets another.
func runCampaign(t *testing.T, cuts int) *campaign {
	t.Helper()
	s, err := fromEnvironment(cuts)
	if err != nil {
		t.Fatal(err)
	}
	build, err := vm.FindBuild()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d cuts, way %s, seed %d", s.cuts, s.way, s.seed)
	c := &campaign{settings: s, dir: t.TempDir(), keep: filepath.Join(build.Dir, "cuts"), say: t.Logf}
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
