package main

import (
	"bytes"
	"errors"
	"flag"
	"strings"
	"testing"
)

func TestHelpTeachesAndListsEveryRowOnce(t *testing.T) {
	var w bytes.Buffer
	if _, err := parse([]string{"--help"}, &w); !errors.Is(err, flag.ErrHelp) {
		t.Fatalf("want flag.ErrHelp\ngot  %v", err)
	}
	for _, want := range append([]string{"Examples:", "KATA_AGENT", "-rows REGEX", "-runs N", "-json PATH"}, issueRows...) {
		if !strings.Contains(w.String(), want) {
			t.Errorf("the help says nothing of %q", want)
		}
	}
	if n := strings.Count(w.String(), "\n  vsock_echo_rtt "); n != 1 {
		t.Errorf("vsock_echo_rtt is listed\nwant once\ngot  %d times", n)
	}
}

func TestAWrongCommandLineIsNamed(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--runs", "4"}, "4 runs"},
		{[]string{"--rows", "no_such_row"}, "no_such_row"},
		{[]string{"--rows", "("}, "missing closing"},
		{[]string{"now"}, `"now"`},
		{[]string{"--fast"}, "fast"},
	} {
		if _, err := parse(c.args, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v\nwant an error with %q\ngot  %v", c.args, c.want, err)
		}
	}
}

func TestTheDefaultsMeasureEverythingInFiveRuns(t *testing.T) {
	o, err := parse(nil, &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	if o.runs != 5 || o.json != "build/bench.json" || len(chosen(o.rows)) != len(experiments) {
		t.Errorf("got %+v", o)
	}
}
