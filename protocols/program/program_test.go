package program_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/program/programtest"
	"github.com/directvol/directvol/protocols/version"
)

// example returns a program with one verb, which calls run.
func example(run func(cmd *cobra.Command) error) *cobra.Command {
	root := &cobra.Command{Use: "example", Short: "Be an example"}
	verb := &cobra.Command{Use: "verb", Short: "Do it", Args: program.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd) }}
	verb.Flags().Int("count", 1, "how often")
	root.AddCommand(verb)
	return root
}

func TestExitStatusSaysHowItEnded(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for name, c := range map[string]struct {
		ctx  context.Context
		err  error
		want programtest.Result
	}{
		"success":             {t.Context(), nil, programtest.Result{}},
		"success at last":     {over, nil, programtest.Result{}},
		"failure":             {t.Context(), errors.New("no such volume"), programtest.Result{Exit: program.Failed, Stderr: "example: no such volume\n"}},
		"its own status":      {t.Context(), program.WithStatus(3, errors.New("missed")), programtest.Result{Exit: 3, Stderr: "example: missed\n"}},
		"no error":            {t.Context(), program.WithStatus(3, nil), programtest.Result{}},
		"reported":            {t.Context(), program.ErrReported, programtest.Result{Exit: program.Failed}},
		"usage":               {t.Context(), program.Usagef("--count %d: want more", 0), programtest.Result{Exit: program.WrongUsage, Stderr: "example: --count 0: want more; see example verb --help\n"}},
		"usage, in two lines": {t.Context(), program.Usage(errors.New("a\n\n\tb")), programtest.Result{Exit: program.WrongUsage, Stderr: "example: a b; see example verb --help\n"}},
		"interrupted":         {over, context.Canceled, programtest.Result{Exit: program.Interrupted, Stderr: "example: interrupted\n"}},
		"interrupted, and":    {over, errors.New("it is left"), programtest.Result{Exit: program.Interrupted, Stderr: "example: interrupted: it is left\n"}},
		"interrupted in it":   {over, fmt.Errorf("dial a: %w", context.Canceled), programtest.Result{Exit: program.Interrupted, Stderr: "example: interrupted: dial a\n"}},
		"it says so":          {over, errors.New("interrupted while it mounted"), programtest.Result{Exit: program.Interrupted, Stderr: "example: interrupted while it mounted\n"}},
		"reported, and":       {over, program.ErrReported, programtest.Result{Exit: program.Interrupted, Stderr: "example: interrupted\n"}},
	} {
		if got := programtest.Run(c.ctx, example(func(*cobra.Command) error { return c.err }), "verb"); got != c.want {
			t.Errorf("%s\nwant %+v\ngot  %+v", name, c.want, got)
		}
	}
}

func TestWrongCommandLineIsUsageAndTriesNothing(t *testing.T) {
	for says, args := range map[string][]string{
		`unknown command "vreb" for "example"`: {"vreb"},
		"Did you mean this? verb":              {"verd"},
		"--fast":                               {"verb", "--fast"},
		`"x" for "--count"`:                    {"verb", "--count", "x"},
		`unexpected argument "stray"`:          {"verb", "stray"},
	} {
		got := programtest.Run(t.Context(), example(func(*cobra.Command) error { t.Errorf("%q ran", args); return nil }), args...)
		if got.Exit != program.WrongUsage || got.Stdout != "" || !strings.Contains(got.Stderr, says) || !strings.Contains(got.Stderr, "; see example") || strings.Count(got.Stderr, "\n") != 1 {
			t.Errorf("%q\nwant exit 2, and one line with %s\ngot  %+v", args, says, got)
		}
	}
}

func TestVersionAndHelpAreAnswers(t *testing.T) {
	want := programtest.Result{Stdout: "example " + version.String() + "\n"}
	if got := programtest.Run(t.Context(), example(nil), "--version"); got != want {
		t.Errorf("--version\nwant %+v\ngot  %+v", want, got)
	}
	for _, args := range [][]string{nil, {"--help"}, {"help"}} {
		if got := programtest.Run(t.Context(), example(nil), args...); got.Exit != program.OK || got.Stderr != "" || !strings.Contains(got.Stdout, "Do it") {
			t.Errorf("%q\nwant the help\ngot  %+v", args, got)
		}
	}
}

// Only an EPIPE of the standard output counts; an EPIPE of a socket does not.
func TestReaderThatHasGoneIsKnownFromASocket(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	defer w.Close()
	stdout := os.NewFile(uintptr(mustDup(t, w)), os.Stdout.Name())
	defer stdout.Close()
	for name, c := range map[string]struct {
		to   io.Writer
		want int
	}{"the standard output": {stdout, program.Unread}, "something else": {w, program.Failed}} {
		got := programtest.Run(t.Context(), example(func(*cobra.Command) error {
			_, err := io.WriteString(c.to, "x")
			return err
		}), "verb")
		if got.Exit != c.want || (got.Stderr == "") != (c.want == program.Unread) {
			t.Errorf("%s\nwant exit %d\ngot  %+v", name, c.want, got)
		}
	}
}

// cobra itself writes the version: a failure of that write is no error of the command line.
func TestVersionThatCannotBeWrittenIsNoWrongCommandLine(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	defer w.Close()
	for want, file := range map[int]*os.File{program.Failed: full, program.Unread: w} {
		stdout := os.NewFile(uintptr(mustDup(t, file)), os.Stdout.Name())
		var errs bytes.Buffer
		got := program.Run(t.Context(), example(nil), []string{"--version"}, stdout, &errs)
		stdout.Close()
		if got != want || strings.Contains(errs.String(), "--help") || strings.Contains(errs.String(), "no space") != (want == program.Failed) {
			t.Errorf("--version to %s\nwant exit %d\ngot  %d, %q", file.Name(), want, got, errs.String())
		}
	}
}

func mustDup(t *testing.T, f *os.File) int {
	t.Helper()
	fd, err := unix.Dup(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	return fd
}
