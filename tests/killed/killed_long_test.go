//go:build long

package killed

import (
	"os"
	"path/filepath"
	"testing"
)

func TestCampaignOfKillsLosesNothing(t *testing.T) {
	c, others := runCampaign(t, 300, nil, "usual"), runCampaign(t, 60, nil, "others")
	if err := os.WriteFile(filepath.Join(filepath.Dir(c.keep), "killed.md"), []byte(c.report()+"\n"+others.report()), 0o644); err != nil {
		t.Fatal(err)
	}
}
