package main

import (
	"bytes"
	"net"
	"path/filepath"
	"strings"
	"testing"
)

// run executes the command line and returns what it printed.
func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := newRootCommand()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
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
		out, err := run(t, args...)
		if err == nil {
			t.Errorf("%q succeeded", args)
			continue
		}
		if got := err.Error(); !strings.Contains(got, want) || strings.Contains(got, "\n") || out != "" {
			t.Errorf("%q\n got %q, and printed %q\nwant one line with %q", args, got, out, want)
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
		out, err := run(t, c.args...)
		if err != nil {
			t.Errorf("%q: %v", c.args, err)
		}
		if !strings.Contains(out, c.want) {
			t.Errorf("%q does not show %s:\n%s", c.args, c.want, out)
		}
	}
}
