//go:build long

package cuts

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/directvol/directvol/tests/vm"
)

func TestEveryFormatGrowsToTwoTebibytesThroughKills(t *testing.T) {
	runMatrix(t, matrix, 600*miB, 10*giB, 40*giB, 300*giB, 2*tiB)
}

func TestCampaignOfCutsLosesNothing(t *testing.T) {
	report := runCampaign(t, 200, "usual").report() + "\n" + runCampaign(t, 60, "others").report() + "\n" + runCampaign(t, 30, mapped).report()
	build, err := vm.FindBuild()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(build.Dir, "cuts.md"), []byte(report), 0o644); err != nil {
		t.Fatal(err)
	}
}
