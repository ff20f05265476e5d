package main

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
)

// sample is a report with a row of each kind.
func sample() *Report {
	r := &Report{Machine: Machine{HostCPU: "a CPU", CPUOption: "max"}, Rows: []Row{}}
	runs := trials([2][]float64{{1.25, 1.5}, {1}}, [2][]float64{{1.5}, {1}})
	for i := range runs {
		runs[i] = trial{"health_check_rtt_apart": runs[i]["a"], "vsock_echo_rtt": runs[i]["b"], "agent_binary_bytes": {7e6 + 1}, "fio_randread": {4000}, "fio_randread_by_hand": {4000}}
	}
	for _, l := range []line{
		{name: "vsock_echo_rtt", unit: "µs", what: "the floor"},
		{name: "health_check_rtt_apart", unit: "µs", what: "Check | more", baseline: "vsock_echo_rtt", goal: atMost(1.3)},
		{name: "agent_binary_bytes", unit: "bytes", what: "the program", goal: atMost(7e6)},
		{name: "fio_randread_by_hand", unit: "IOPS", what: "by hand"},
		{name: "fio_randread", unit: "IOPS", what: "reads", baseline: "fio_randread_by_hand", goal: atLeast(0.99)},
	} {
		r.add([]Row{summarize(l, runs, r.Rows)})
	}
	return r
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
	err := r.check()
	if !errors.Is(err, errMissed) || !strings.Contains(err.Error(), "health_check_rtt_apart is 1.44, and its target ≤ 1.30; agent_binary_bytes is") || strings.Contains(err.Error(), "fio") {
		t.Errorf("want the two that miss theirs\ngot  %v", err)
	}
	r.Rows = slices.DeleteFunc(r.Rows, func(row Row) bool { return row.Verdict != nil && !row.Met })
	r.leaveOut(experiment{lines: []line{{name: "kata_rtt", goal: behind("rtt")}, {name: "floor"}}}, errors.New("set KATA_AGENT"))
	if err := r.check(); err != nil {
		t.Errorf("all are met, and it says %v", err)
	}
	r.leaveOut(experiment{lines: []line{{name: "fio_requests", goal: atMost(1.01)}}}, errors.New("install fio"))
	if err := r.check(); !errors.Is(err, errMissed) || !strings.Contains(err.Error(), "fio_requests was not measured") {
		t.Errorf("want the one that was not measured\ngot  %v", err)
	}
}

func TestTheFirstEchoCounts(t *testing.T) {
	r := sample()
	r.add([]Row{{Name: "vsock_echo_rtt", Value: 99}, {Name: "new"}})
	if r.Rows[0].Value != 1 || len(r.Rows) != 6 {
		t.Errorf("want the first vsock_echo_rtt and one row more\ngot  %v", names(r.Rows))
	}
}

func TestAReportIsWrittenAsJSONMarkdownAndCharts(t *testing.T) {
	r := sample()
	r.leaveOut(experiment{lines: []line{{name: "kata_rtt"}}}, errors.New("set KATA_AGENT\nand more"))
	path := filepath.Join(t.TempDir(), "new", "bench.json")
	written, err := r.write(path)
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
			for _, want := range []string{"| health_check_rtt_apart | 1.50 µs ", "≤ 1.30", "not met", "(bench-rtt.svg)", "Check | more", "kata_rtt: set KATA_AGENT\n", "| -cpu | max |"} {
				if !strings.Contains(string(text), want) {
					t.Errorf("the markdown lacks %q:\n%s", want, text)
				}
			}
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
	r := &Report{Rows: sample().Rows[:1]} // the echo alone
	files, err := r.charts(filepath.Join(t.TempDir(), "bench"))
	if err != nil || len(files) != 0 {
		t.Errorf("want none\ngot  %v, %v", files, err)
	}
}

func TestNumbersAreShortAndGrouped(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 1: "1", 1.3: "1.30", 0.99: "0.99", 12.34: "12.3", 412.7: "413", 1234.5: "1,234", 7_000_000: "7,000,000", -1242.4: "−1,242", -0.5: "−0.50",
	} {
		if got := number(v); got != want {
			t.Errorf("%v\nwant %s\ngot  %s", v, want, got)
		}
	}
}
