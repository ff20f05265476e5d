package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/program/programtest"
	"github.com/directvol/directvol/tools/bench/experiments"
	"github.com/directvol/directvol/tools/bench/measure"
	"github.com/directvol/directvol/tools/bench/report"
)

func TestHelpTeachesAndListsEveryRowOnce(t *testing.T) {
	got := programtest.Run(t.Context(), newCommand(), "--help")
	if got.Exit != program.OK {
		t.Errorf("exit status\nwant 0\ngot  %d", got.Exit)
	}
	want := []string{"Examples:", "KATA_AGENT", "--rows REGEX", "--row NAME,...", "--runs N", "--json FILE", "--check"}
	for _, l := range experiments.Lines() {
		want = append(want, "\n  "+l.Name+" ")
	}
	for _, w := range want {
		if !strings.Contains(got.Stdout, w) {
			t.Errorf("the help says nothing of %q", w)
		}
	}
	if n := strings.Count(got.Stdout, "\n  vsock_echo_rtt "); n != 1 {
		t.Errorf("vsock_echo_rtt is listed\nwant once\ngot  %d times", n)
	}
}

func TestWrongCommandLineIsNamed(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--runs", "4"}, "4 runs"},
		{[]string{"--rows", "no_such_row"}, "no_such_row"},
		{[]string{"--row", "vsock_echo_rtt,no_such_row"}, `no row is named "no_such_row"`},
		{[]string{"--rows", "("}, "missing closing"},
		{[]string{"now"}, `"now"`},
		{[]string{"--fast"}, "fast"},
	} {
		got := programtest.Run(t.Context(), newCommand(), c.args...)
		if got.Exit != program.WrongUsage || got.Stdout != "" || !strings.Contains(got.Stderr, c.want) || !strings.Contains(got.Stderr, "see bench --help") {
			t.Errorf("%v\nwant exit 2 and %q\ngot  %+v", c.args, c.want, got)
		}
	}
}

// Otherwise it would be noticed after fifteen minutes of measuring.
func TestFileThatCannotBeWrittenEndsItAtOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	got := programtest.Run(t.Context(), newCommand(), "--row", "vsock_echo_rtt", "--json", filepath.Join(file, "x.json"))
	if got.Exit != program.Failed || got.Stdout != "" || !strings.Contains(got.Stderr, file) {
		t.Errorf("\nwant exit 1, nothing begun, and %s named\ngot  %+v", file, got)
	}
}

func TestRowsAreChosenByNameAndByPattern(t *testing.T) {
	for _, c := range []struct {
		names   []string
		pattern string
		chosen  []string
		not     []string
	}{
		{nil, "", []string{"resize_xfs", "boot_to_mount"}, nil},
		{[]string{"resize_xfs"}, "", []string{"resize_xfs"}, []string{"resize_xfs_call", "boot_to_mount"}},
		{nil, "^resize_xfs", []string{"resize_xfs", "resize_xfs_call"}, []string{"boot_to_mount"}},
		{[]string{"boot_to_mount"}, "xfs$", []string{"resize_xfs", "boot_to_mount"}, []string{"resize_ext4"}},
	} {
		wanted, err := selection(c.names, c.pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range c.chosen {
			if !wanted(name) {
				t.Errorf("%v %q leaves %s out", c.names, c.pattern, name)
			}
		}
		for _, name := range c.not {
			if wanted(name) {
				t.Errorf("%v %q chooses %s", c.names, c.pattern, name)
			}
		}
	}
}

func TestMissedTargetHasAnExitStatusOfItsOwn(t *testing.T) {
	unmeasured := measure.Omission{Lines: []measure.Line{{Name: "row", Goal: measure.AtMost(1)}}, Why: errors.New("it broke")}
	for _, c := range []struct {
		leftOut []measure.Omission
		want    int
	}{{nil, program.OK}, {[]measure.Omission{unmeasured}, 3}} {
		cmd := newCommand()
		cmd.RunE = func(*cobra.Command, []string) error {
			return checked(report.New(report.Machine{}, &measure.Result{LeftOut: c.leftOut}))
		}
		if got := programtest.Run(t.Context(), cmd); got.Exit != c.want {
			t.Errorf("left out: %v\nwant exit %d\ngot  %+v", c.leftOut, c.want, got)
		}
	}
}
