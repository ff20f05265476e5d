//go:build long

package killed

import (
	"os"
	"path/filepath"
	"testing"
)

func TestCampaignOfKillsLosesNothing(t *testing.T) {
	c := runCampaign(t, 300, nil)
	if err := os.WriteFile(filepath.Join(filepath.Dir(c.keep), "killed.md"), []byte(c.report()), 0o644); err != nil {
		t.Fatal(err)
	}
}
