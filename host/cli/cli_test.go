package cli

import (
	"bytes"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/protocols/program"
)

// result is the outcome of running a command line.
type result struct {
	exit        int
	out, errors string
}

func run(t *testing.T, args ...string) result {
	t.Helper()
	var out, errs bytes.Buffer
	exit := program.Run(t.Context(), New(), args, &out, &errs)
	return result{exit, out.String(), errs.String()}
}

func TestErrorsAreOneLineThatTeaches(t *testing.T) {
	dir := t.TempDir()
	live := filepath.Join(dir, "live.sock")
	l, err := net.Listen("unix", live)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	other := filepath.Join(dir, "other.sock")
	for want, args := range map[string][]string{
		"unknown command":            {"nonsense"},
		"--help":                     {"vhost-vsock", "--nonsense"},
		`"guest-cid"`:                {"vhost-vsock", "--socket", other, "--uds-path", live},
		"guest CID 2":                {"vhost-vsock", "--socket", other, "--uds-path", other + "2", "--guest-cid", "2"},
		"taken by a running process": {"vhost-vsock", "--socket", live, "--uds-path", other, "--guest-cid", "3"},
		"choose a shorter one":       {"vhost-vsock", "--socket", other, "--uds-path", strings.Repeat("x", 200), "--guest-cid", "3"},
	} {
		got := run(t, args...)
		if got.exit == program.OK || !strings.Contains(got.errors, want) || strings.Count(got.errors, "\n") != 1 || got.out != "" {
			t.Errorf("%q\nwant one line with %q\ngot  %+v", args, want, got)
		}
	}
}

func TestHelpShowsHowToUseIt(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "vhost-vsock"}, {nil, "rescue"}, {[]string{"--help"}, "vhost-vsock"}, {[]string{"vhost-vsock", "--help"}, "vhost-vsock"},
		{[]string{"rescue", "--help"}, "EUCLEAN"}, {[]string{"rescue", "--help"}, "directvol rescue /"},
	} {
		if got := run(t, c.args...); got.exit != program.OK || !strings.Contains(got.out, c.want) {
			t.Errorf("%q does not show %s:\n%+v", c.args, c.want, got)
		}
	}
}
