package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/program/programtest"
)

// A disk that cannot grow because the host's disk is full would look like a fault of the volume,
// minutes into the demo.
func TestSmallFolderIsRefusedBeforeTheBoot(t *testing.T) {
	small := t.TempDir()
	if err := unix.Mount("none", small, "tmpfs", 0, "size=2m"); err != nil {
		t.Skip(err, ": a small disk takes a mount: run as root: go test -run SmallFolder ./tools/demo")
	}
	defer unix.Unmount(small, unix.MNT_DETACH)
	facts := filepath.Join(t.TempDir(), "facts.json")
	t.Setenv("TMPDIR", small)
	got := programtest.Run(t.Context(), newCommand(), "--json", facts)
	if got.Exit != program.Failed || !strings.Contains(got.Stderr, "TMPDIR") || strings.Contains(got.Stdout, "Boot") {
		t.Errorf("want exit 1 before the boot, and TMPDIR named\ngot  %+v", got)
	}
	if text, err := os.ReadFile(facts); err != nil || !strings.Contains(string(text), `"ok": false`) {
		t.Errorf("facts: %s (%v)", text, err)
	}
}

func TestMissingTMPDIRIsNamed(t *testing.T) {
	facts := t.TempDir()
	missing := filepath.Join(facts, "nope")
	t.Setenv("TMPDIR", missing)
	if got := programtest.Run(t.Context(), newCommand(), "--json", filepath.Join(facts, "facts.json")); got.Exit != program.Failed || !strings.Contains(got.Stderr, missing) || !strings.Contains(got.Stderr, "TMPDIR") || strings.Contains(got.Stdout, "Boot") {
		t.Errorf("want exit 1 before the boot, and TMPDIR named\ngot  %+v", got)
	}
}

func TestFactsGoToAFolderThatIsThere(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "nope")
	if got := programtest.Run(t.Context(), newCommand(), "--json", filepath.Join(missing, "x")); got.Exit != program.Failed || got.Stdout != "" || !strings.Contains(got.Stderr, "top of the checkout") {
		t.Errorf("want exit 1, nothing begun, and where it starts from\ngot  %+v", got)
	}
	if _, err := os.Stat(missing); err == nil {
		t.Error("the folder was made")
	}
}

func TestStepSaysHowItEnded(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for want, c := range map[string]struct {
		ctx context.Context
		err error
	}{
		"the step: ok, all of it": {t.Context(), nil},
		"the step: FAILED":        {t.Context(), errors.New("no")},
		"the step: interrupted":   {over, errors.New("no")},
	} {
		var out bytes.Buffer
		s := newTranscript(&out)
		err := s.step(c.ctx, "the step", func(_ context.Context, say func(string)) error {
			say("all of it")
			return c.err
		})
		if !strings.HasSuffix(out.String(), want+"\n") || !errors.Is(err, c.err) || len(s.steps) != 1 {
			t.Errorf("\nwant %s\ngot  %s(%v)", want, out.String(), err)
		}
	}
}

func TestReaderThatGoesAwayEndsTheDemo(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	defer w.Close()
	ctx, gone := context.WithCancelCause(t.Context())
	newTranscript(audience{w, gone}).section("One")
	if err := context.Cause(ctx); !errors.Is(err, unix.EPIPE) {
		t.Errorf("cause\nwant broken pipe\ngot  %v", err)
	}
}
