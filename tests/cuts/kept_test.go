package cuts

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// The kept image of a cut can be checked any number of times. The blocks that it must contain are
// no longer known.
func TestKeptImageMountsAndGrowsOn(t *testing.T) {
	kept := os.Getenv("CUTS_IMAGE")
	if kept == "" {
		t.Skip("no image is named: run it as CUTS_IMAGE=$PWD/build/cuts/NAME.img go test -v -run Kept ./tests/cuts")
	}
	s, err := fromEnvironment(1, "usual")
	if err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(t.TempDir(), "image")
	if err := vm.CopySparse(image, kept); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(image)
	if err != nil {
		t.Fatal(err)
	}
	g, err := vm.Boot(t.Context(), vm.Options{Newer: s.newer, Append: tellWarnings})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		g.Explain(t.Output())
		g.Kill()
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	fstype, _, _ := strings.Cut(filepath.Base(kept), "-")
	r := &remains{volume: &volume{disk: disk{fstype: fstype}, size: uint64(info.Size())}, path: image, ledger: remote.NewLedger(blockBytes)}
	var found []finding
	err = limited(t.Context(), func(ctx context.Context) error {
		found, err = r.check(ctx, g, ways[s.way], "kept")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		t.Errorf("%s: %v", f.loss, f.err)
	}
}
