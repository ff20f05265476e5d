package cuts

import (
	"path/filepath"
	"testing"

	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

func TestTwentyCutsLoseNothing(t *testing.T) { runCampaign(t, 20, "usual") }

func TestSameCallFinishesAGrowthThatAKillInterrupted(t *testing.T) {
	runMatrix(t, named("ext4-bigalloc", "xfs-1k"), 600*miB, 20*giB)
}

// runMatrix grows volumes of some formats to each size in turn.
func runMatrix(t *testing.T, formats []shape, sizes ...uint64) {
	t.Helper()
	c := newCampaign(t, len(sizes), "usual")
	finish(t, c, c.grows(t.Context(), formats, sizes))
}

// runCampaign makes the given number of cuts of a set of formats, unless the environment sets
// others.
func runCampaign(t *testing.T, cuts int, set string) *campaign {
	t.Helper()
	c := newCampaign(t, cuts, set)
	if c.set == mapped {
		c.image = vmtest.Image(t, []string{"dm-mod"})
	}
	t.Logf("%d cuts, formats %s, way %s", c.cuts, c.set, c.way)
	err := c.run(t.Context())
	t.Logf("\n%s", c.report())
	finish(t, c, err)
	return c
}

// finish fails if a campaign has failed.
func finish(t *testing.T, c *campaign, err error) {
	t.Helper()
	for _, text := range c.failures {
		t.Error(text)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// newCampaign has the settings of the environment, or else these.
func newCampaign(t *testing.T, cuts int, set string) *campaign {
	t.Helper()
	s, err := fromEnvironment(cuts, set)
	if err != nil {
		t.Fatal(err)
	}
	build, err := vm.FindBuild()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("seed %d", s.seed)
	return &campaign{settings: s, dir: t.TempDir(), keep: filepath.Join(build.Dir, "cuts"), say: t.Logf}
}
