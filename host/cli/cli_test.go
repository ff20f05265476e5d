package cli

import (
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/program/programtest"
)

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
		"unknown command":              {"nonsense"},
		"--help":                       {"vhost-vsock", "--nonsense"},
		`"guest-cid"`:                  {"vhost-vsock", "--socket", other, "--uds-path", live},
		"guest CID 2":                  {"vhost-vsock", "--socket", other, "--uds-path", other + "2", "--guest-cid", "2"},
		"a running process listens on": {"vhost-vsock", "--socket", live, "--uds-path", other, "--guest-cid", "3"},
		"choose a shorter one":         {"vhost-vsock", "--socket", other, "--uds-path", strings.Repeat("x", 200), "--guest-cid", "3"},
	} {
		got := programtest.Run(t.Context(), New(), args...)
		if got.Exit == program.OK || !strings.Contains(got.Stderr, want) || strings.Count(got.Stderr, "\n") != 1 || got.Stdout != "" {
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
		if got := programtest.Run(t.Context(), New(), c.args...); got.Exit != program.OK || !strings.Contains(got.Stdout, c.want) {
			t.Errorf("%q does not show %s:\n%+v", c.args, c.want, got)
		}
	}
}
