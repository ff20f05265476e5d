package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/directvol/directvol/tools/bench/measure"
)

// sample returns a report with a row of each kind.
func sample() *Report {
	result := &measure.Result{Rows: []measure.Row{}, Sections: []measure.Section{{Name: "round trips", Seconds: 12.34, Runs: 5}, {Name: "fio", Seconds: 60, Runs: 10}}}
	var runs []measure.Trial
	for _, check := range [][]float64{{1.25, 1.5}, {1.5}} {
		runs = append(runs, measure.Trial{"health_check_rtt_apart": check, "vsock_echo_rtt": {1}, "agent_binary_bytes": {7e6 + 1}, "fio_randread": {4000}, "fio_randread_by_hand": {4000}})
	}
	for _, l := range []measure.Line{
		{Name: "vsock_echo_rtt", Unit: "µs", What: "the floor"},
		{Name: "health_check_rtt_apart", Unit: "µs", What: "Check | more", Baseline: "vsock_echo_rtt", Goal: measure.AtMost(1.3)},
		{Name: "agent_binary_bytes", Unit: "bytes", What: "the program", Goal: measure.AtMost(7e6)},
		{Name: "fio_randread_by_hand", Unit: "IOPS", What: "by hand"},
		{Name: "fio_randread", Unit: "IOPS", What: "reads", Baseline: "fio_randread_by_hand", Goal: measure.AtLeast(0.99)},
	} {
		result.Rows = append(result.Rows, measure.Summarize(l, runs, result.Rows))
	}
	return New(Machine{HostCPU: "a CPU", CPUOption: "max"}, result)
}

func TestTheJSONHasItsShape(t *testing.T) {
	text, err := json.Marshal(sample().Rows[:3])
	if err != nil {
		t.Fatal(err)
	}
	const want = `[{"name":"vsock_echo_rtt","unit":"µs","value":1,"p99":1,"n":2,"runs":[1,1]},` +
		`{"name":"health_check_rtt_apart","unit":"µs","value":1.5,"p99":1.5,"n":3,"runs":[1.375,1.5],"baseline":"vsock_echo_rtt","ratio":1.4375,"ratio_min":1.375,"ratio_max":1.5,"target":1.3,"met":false,"uncertain":false},` +
		`{"name":"agent_binary_bytes","unit":"bytes","value":7000001,"p99":7000001,"n":2,"runs":[7000001,7000001],"target":7000000,"met":false,"uncertain":false}]`
	if string(text) != want {
		t.Errorf("\nwant %s\ngot  %s", want, text)
	}
}

func TestAMissedTargetIsNamed(t *testing.T) {
	r := sample()
	err := r.Check()
	if !errors.Is(err, ErrMissed) || !strings.Contains(err.Error(), "health_check_rtt_apart is 1.44, and its target ≤ 1.30; agent_binary_bytes is") || strings.Contains(err.Error(), "fio") {
		t.Errorf("want the two that miss theirs\ngot  %v", err)
	}
	r.Rows = slices.DeleteFunc(r.Rows, func(row measure.Row) bool { return row.Verdict != nil && !row.Met })
	r.leaveOut(measure.Omission{Lines: []measure.Line{{Name: "kata_rtt", Goal: measure.Behind("rtt")}, {Name: "floor"}}, Why: errors.New("set KATA_AGENT")})
	if err := r.Check(); err != nil {
		t.Errorf("all are met, and it says %v", err)
	}
	r.leaveOut(measure.Omission{Lines: []measure.Line{{Name: "fio_requests", Goal: measure.AtMost(1.01)}}, Why: errors.New("install fio")})
	if err := r.Check(); !errors.Is(err, ErrMissed) || !strings.Contains(err.Error(), "fio_requests was not measured") {
		t.Errorf("want the one that was not measured\ngot  %v", err)
	}
}

func TestAReportIsWrittenAsJSONMarkdownAndCharts(t *testing.T) {
	r := sample()
	r.leaveOut(measure.Omission{Lines: []measure.Line{{Name: "kata_rtt"}}, Why: errors.New("set KATA_AGENT\nand more")})
	path := filepath.Join(t.TempDir(), "new", "bench.json")
	written, err := r.Write(path)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, file := range written {
		got = append(got, filepath.Base(file))
	}
	if want := []string{"bench.json", "bench.md", "bench-rtt.svg", "bench-memory.svg", "bench-fio.svg"}; !slices.Equal(got, want) {
		t.Errorf("files\nwant %v\ngot  %v", want, got)
	}
	for _, file := range written {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		switch filepath.Ext(file) {
		case ".svg":
			wellFormed(t, file, text)
		case ".md":
			for _, want := range []string{"| health_check_rtt_apart | 1.50 µs ", "≤ 1.30", "not met", "(bench-rtt.svg)", "Check | more", "kata_rtt: set KATA_AGENT\n", "| -cpu | max |", "| round trips | 5 | 12.3 s |", "| all | 15 | 72.3 s |"} {
				if !strings.Contains(string(text), want) {
					t.Errorf("the markdown lacks %q:\n%s", want, text)
				}
			}
		}
	}
}

// Fifteen minutes of figures must not be lost for a chart, or for want of room.
func TestFiguresAreWrittenWhereTheRestCannotBe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bench.json")
	if err := os.Mkdir(strings.TrimSuffix(path, ".json")+"-rtt.svg", 0o755); err != nil { // in the way of the first chart
		t.Fatal(err)
	}
	written, err := sample().Write(path)
	if err == nil || !strings.Contains(err.Error(), "bench-rtt.svg") || strings.Contains(strings.Join(written, " "), "-rtt.svg") || !slices.Contains(written, path) {
		t.Errorf("\nwant an error of the chart, and the others written\ngot  %v, %v", written, err)
	}
	for _, file := range written {
		if text, err := os.ReadFile(file); err != nil || strings.Contains(string(text), "-rtt.svg") {
			t.Errorf("%s\nwant it there, without the chart\ngot  %v", file, err)
		}
	}
}

func wellFormed(t *testing.T, file string, text []byte) {
	decoder := xml.NewDecoder(bytes.NewReader(text))
	elements := 0
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if _, ok := token.(xml.StartElement); ok {
			elements++
		}
	}
	if elements < 10 {
		t.Errorf("%s draws %d elements: nothing", file, elements)
	}
}

func TestAChartWithoutItsRowsIsNotDrawn(t *testing.T) {
	r := &Report{Rows: sample().Rows[:1]} // only the echo
	files, err := r.charts(filepath.Join(t.TempDir(), "bench"))
	if err != nil || len(files) != 0 {
		t.Errorf("want none\ngot  %v, %v", files, err)
	}
}

func TestTheProcessorsModelIsRead(t *testing.T) {
	if got := CPUModel("processor\t: 0\nmodel\t\t: 49\nmodel name\t: AMD EPYC: a CPU\nmodel name\t: other\n"); got != "AMD EPYC: a CPU" {
		t.Errorf("got %q", got)
	}
	if got := CPUModel("processor\t: 0\n"); got != "" {
		t.Errorf("want nothing\ngot  %q", got)
	}
}
