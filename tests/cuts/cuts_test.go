package cuts

import (
	"path/filepath"
	"testing"

	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

func TestTwentyCutsLoseNothing(t *testing.T) { runCampaign(t, 20, "usual") }

// runCampaign makes the given number of cuts of a set of formats, unless the environment sets
// others.
func runCampaign(t *testing.T, cuts int, set string) *campaign {
	t.Helper()
	s, err := fromEnvironment(cuts, set)
	if err != nil {
		t.Fatal(err)
	}
	build, err := vm.FindBuild()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d cuts, formats %s, way %s, seed %d", s.cuts, s.set, s.way, s.seed)
	c := &campaign{settings: s, dir: t.TempDir(), keep: filepath.Join(build.Dir, "cuts"), say: t.Logf}
	if s.set == mapped {
		c.image = vmtest.Image(t, []string{"dm-mod"})
	}
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
