package program

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/version"
)

// example returns a program with one verb, which calls run.
func example(run func(cmd *cobra.Command) error) *cobra.Command {
	root := &cobra.Command{Use: "example", Short: "Be an example"}
	verb := &cobra.Command{Use: "verb", Short: "Do it", Args: NoArgs, RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd) }}
	verb.Flags().Int("count", 1, "how often")
	root.AddCommand(verb)
	return root
}

type result struct {
	status      int
	out, errors string
}

func try(ctx context.Context, root *cobra.Command, args ...string) result {
	var out, errs bytes.Buffer
	status := Run(ctx, root, args, &out, &errs)
	return result{status, out.String(), errs.String()}
}

func TestExitStatusSaysHowItEnded(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for name, c := range map[string]struct {
		ctx  context.Context
		err  error
		want result
	}{
		"success":             {t.Context(), nil, result{OK, "", ""}},
		"success at last":     {over, nil, result{OK, "", ""}},
		"failure":             {t.Context(), errors.New("no such volume"), result{Failed, "", "example: no such volume\n"}},
		"its own status":      {t.Context(), WithStatus(3, errors.New("missed")), result{3, "", "example: missed\n"}},
		"no error":            {t.Context(), WithStatus(3, nil), result{OK, "", ""}},
		"reported":            {t.Context(), ErrReported, result{Failed, "", ""}},
		"usage":               {t.Context(), Usagef("--count %d: want more", 0), result{WrongUsage, "", "example: --count 0: want more; see example verb --help\n"}},
		"usage, in two lines": {t.Context(), Usage(errors.New("a\n\n\tb")), result{WrongUsage, "", "example: a b; see example verb --help\n"}},
		"interrupted":         {over, context.Canceled, result{Interrupted, "", "example: interrupted\n"}},
		"interrupted, and":    {over, errors.New("it is left"), result{Interrupted, "", "example: interrupted: it is left\n"}},
		"it says so":          {over, errors.New("interrupted while it mounted"), result{Interrupted, "", "example: interrupted while it mounted\n"}},
		"reported, and":       {over, ErrReported, result{Interrupted, "", "example: interrupted\n"}},
	} {
		if got := try(c.ctx, example(func(*cobra.Command) error { return c.err }), "verb"); got != c.want {
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
		got := try(t.Context(), example(func(*cobra.Command) error { t.Errorf("%q ran", args); return nil }), args...)
		if got.status != WrongUsage || got.out != "" || !strings.Contains(got.errors, says) || !strings.Contains(got.errors, "; see example") || strings.Count(got.errors, "\n") != 1 {
			t.Errorf("%q\nwant exit 2, and one line with %s\ngot  %+v", args, says, got)
		}
	}
}

func TestVersionAndHelpAreAnswers(t *testing.T) {
	want := result{OK, "example " + version.String() + "\n", ""}
	if got := try(t.Context(), example(nil), "--version"); got != want {
		t.Errorf("--version\nwant %+v\ngot  %+v", want, got)
	}
	for _, args := range [][]string{nil, {"--help"}, {"help"}} {
		if got := try(t.Context(), example(nil), args...); got.status != OK || got.errors != "" || !strings.Contains(got.out, "Do it") {
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
	}{"the standard output": {stdout, Unread}, "something else": {w, Failed}} {
		got := try(t.Context(), example(func(*cobra.Command) error {
			_, err := io.WriteString(c.to, "x")
			return err
		}), "verb")
		if got.status != c.want || (got.errors == "") != (c.want == Unread) {
			t.Errorf("%s\nwant exit %d\ngot  %+v", name, c.want, got)
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
