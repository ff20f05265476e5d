package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// at returns the texts that the rows show at a time.
func at(lines []shown, seconds float64) map[int]string {
	rows := map[int]string{}
	for _, line := range lines {
		if line.from <= seconds && seconds < line.until {
			rows[line.row] = line.text
		}
	}
	return rows
}

func TestRowsShowWhatATerminalShows(t *testing.T) {
	lines, err := play([]piece{{1, "boot …"}, {2, "\r\x1b[K  1.0 s  boot: ok\r\n"}, {3, "a long line wraps\r\nx"}, {4, "\r \r\n"}}, 16, 0)
	if err != nil {
		t.Fatal(err)
	}
	for seconds, want := range map[float64]map[int]string{
		0.5: {},
		1:   {0: "boot …"},
		2.5: {0: "  1.0 s  boot: o", 1: "k"},
		3:   {0: "  1.0 s  boot: o", 1: "k", 2: "a long line wrap", 3: "s", 4: "x"},
		9:   {0: "  1.0 s  boot: o", 1: "k", 2: "a long line wrap", 3: "s"},
	} {
		if got := at(lines, seconds); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("after %v s\nwant %v\ngot  %v", seconds, want, got)
		}
	}
}

func TestLastPictureIsShownHoweverFewAreLookedAt(t *testing.T) {
	lines, err := play([]piece{{1, "a"}, {1.1, "\rb"}, {1.2, "\rc"}}, 16, 60)
	if err != nil {
		t.Fatal(err)
	}
	want := []shown{{0, "a", 1, 1.2}, {0, "c", 1.2, math.Inf(1)}}
	if !slices.Equal(lines, want) {
		t.Errorf("\nwant %v\ngot  %v", want, lines)
	}
}

func TestControlCharacterThatIsNotKnownIsRefused(t *testing.T) {
	for _, text := range []string{"\x1b[2J", "\a", "\x1b", "\t"} {
		if _, err := play([]piece{{0, "x" + text}}, 80, 0); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

// On a full disk script writes less, and ends with exit status 0.
func TestRecordingThatWasCutOffIsRefused(t *testing.T) {
	const whole, end = "Script started on 2026-01-01\nabcd", "\nScript done on 2026-01-01\n"
	for name, c := range map[string]struct{ output, times string }{
		"no times":             {whole + end, ""},
		"times that end early": {whole + end, "0.5 2\n"},
		"an output cut off":    {whole[:len(whole)-1], "0.5 2\n0.5 2\n"},
		"an output without its end, and times that end early": {whole, "0.5 2\n"},
	} {
		if pieces, err := cut([]byte(c.output), c.times); err == nil {
			t.Errorf("%s\nwant an error\ngot  %v", name, pieces)
		}
	}
}

func TestTypescriptIsCutAtItsTimes(t *testing.T) {
	got, err := cut([]byte("Script started on 2026-01-01 [COMMAND=\"x\"]\nab…\nScript done"), "0.5 3\n1.5 3\n")
	if want := []piece{{0.5, "ab"}, {2, "…\n"}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("\nwant %v\ngot  %v (%v)", want, got, err)
	}
	for _, times := range []string{"x\n", "1 99\n", "1 -1\n", "-1 1\n", "NaN 1\n", "1\n"} {
		if got, err := cut([]byte("ab"), times); err == nil {
			t.Errorf("times %q are taken: %v", times, got)
		}
	}
}

func TestRecordingIsACastAndAnSVG(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	output := "one <1>\r\n"
	for name, text := range map[string]string{"out": output + "t", "timing": fmt.Sprintf("0.25 %d\n0.5 1\n", len(output))} {
		if err := os.WriteFile(path(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	set := settings{typescript: path("out"), timing: path("timing"), cast: path("cast"), svg: path("svg"), title: "a & b", columns: 40, rows: 1, speed: 1}
	if err := run(set); err != nil {
		t.Fatal(err)
	}
	cast, err := os.ReadFile(set.cast)
	if err != nil {
		t.Fatal(err)
	}
	var events []any
	for decoder := json.NewDecoder(strings.NewReader(string(cast))); decoder.More(); {
		var event any
		if err := decoder.Decode(&event); err != nil {
			t.Fatal(err)
		}
		events = append(events, event)
	}
	want := "[map[height:1 title:a & b version:2 width:40] [0.25 o one <1>\r\n] [0.75 o t]]"
	if got := fmt.Sprint(events); got != want {
		t.Errorf("the cast\nwant %s\ngot  %s", want, got)
	}
	svg, err := os.ReadFile(set.svg)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := texts(t, string(svg)), []string{"one <1>", "t"}; !slices.Equal(got, want) {
		t.Errorf("the SVG's texts\nwant %q\ngot  %q", want, got)
	}
	// The SVG lasts 0.75 s plus 6 s of rest. The second row appears at 0.75 s, when the first one
	// scrolls away.
	for _, rule := range []string{"@keyframes k1{0%{visibility:hidden}11.111%{visibility:visible}", "@keyframes scroll{0%{transform:none}11.111%{transform:translateY(-16px)}}"} {
		if !strings.Contains(string(svg), rule) {
			t.Errorf("want %s\ngot  %s", rule, svg)
		}
	}
}

// texts returns the contents of an SVG's text elements. It fails if the SVG is not valid XML.
func texts(t *testing.T, svg string) (all []string) {
	t.Helper()
	decoder := xml.NewDecoder(strings.NewReader(svg))
	inside := false
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			inside = token.Name.Local == "text"
		case xml.CharData:
			if inside {
				all = append(all, string(token))
			}
		case xml.EndElement:
			inside = false
		}
	}
}
