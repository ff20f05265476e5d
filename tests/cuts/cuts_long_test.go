//go:build long

package cuts

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/directvol/directvol/tests/vm"
)

func TestCampaignOfCutsLosesNothing(t *testing.T) {
	c := runCampaign(t, 200)
	build, err := vm.FindBuild()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(build.Dir, "cuts.md"), []byte(c.report()), 0o644); err != nil {
		t.Fatal(err)
	}
}
