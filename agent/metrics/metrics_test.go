package metrics

import (
	"fmt"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

var (
	comment = regexp.MustCompile(`^# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)$`)
	sample  = regexp.MustCompile(`^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[a-z]+="(?:[^"\\\n]|\\[\\n"])*"(?:,[a-z]+="(?:[^"\\\n]|\\[\\n"])*")*\})? (\S+)$`)
)

// parse parses an exposition by stricter rules than Prometheus: each family has help and type, in
// this order, and is followed by its samples, none of them twice.
func parse(text string) (map[string]float64, error) {
	values, families := map[string]float64{}, map[string]bool{}
	var family, kind string
	for line := range strings.Lines(text) {
		line, ended := strings.CutSuffix(line, "\n")
		c, s := comment.FindStringSubmatch(line), sample.FindStringSubmatch(line)
		switch {
		case !ended:
			return nil, fmt.Errorf("%q does not end", line)
		case c != nil && c[1] == "HELP" && !families[c[2]]:
			family, kind = c[2], ""
			families[family] = true
		case c != nil && c[1] == "TYPE" && c[2] == family && kind == "":
			kind = c[3]
		case s != nil && kind != "" && belongs(s[1], family, kind):
			value, err := strconv.ParseFloat(s[3], 64)
			if _, twice := values[s[1]+s[2]]; err != nil || twice || math.IsNaN(value) {
				return nil, fmt.Errorf("%q is not a number, or occurs twice", line)
			}
			values[s[1]+s[2]] = value
		default:
			return nil, fmt.Errorf("%q in the family %s, a %s", line, family, kind)
		}
	}
	return values, nil
}

func belongs(name, family, kind string) bool {
	if kind != Histogram {
		return name == family
	}
	suffix, ok := strings.CutPrefix(name, family)
	return ok && (suffix == "_bucket" || suffix == "_sum" || suffix == "_count")
}

func TestCallsAreCountedByMethodAndCode(t *testing.T) {
	var calls Calls
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() {
			calls.Of("Check").Count(codes.OK)
			calls.Of("ResizeVolume").Observe(codes.OK, 5*time.Millisecond)
			calls.Of("ResizeVolume").Observe(codes.NotFound, 10*time.Millisecond)
			calls.Of("ResizeVolume").Observe(codes.Code(1000), time.Hour)
		})
	}
	all.Wait()
	calls.Of("NeverCalled")
	var text Text
	calls.Write(&text)
	got, err := parse(text.String())
	if err != nil {
		t.Fatalf("%v in\n%s", err, text.String())
	}
	want := map[string]float64{
		`directvol_agent_calls_total{method="Check",code="OK"}`:                          100,
		`directvol_agent_calls_total{method="ResizeVolume",code="OK"}`:                   100,
		`directvol_agent_calls_total{method="ResizeVolume",code="NotFound"}`:             100,
		`directvol_agent_calls_total{method="ResizeVolume",code="Unknown"}`:              100,
		`directvol_agent_call_duration_seconds_bucket{method="ResizeVolume",le="0.001"}`: 0,
		`directvol_agent_call_duration_seconds_bucket{method="ResizeVolume",le="0.01"}`:  200,
		`directvol_agent_call_duration_seconds_bucket{method="ResizeVolume",le="0.1"}`:   200,
		`directvol_agent_call_duration_seconds_bucket{method="ResizeVolume",le="1"}`:     200,
		`directvol_agent_call_duration_seconds_bucket{method="ResizeVolume",le="10"}`:    200,
		`directvol_agent_call_duration_seconds_bucket{method="ResizeVolume",le="+Inf"}`:  300,
		`directvol_agent_call_duration_seconds_sum{method="ResizeVolume"}`:               360001.5,
		`directvol_agent_call_duration_seconds_count{method="ResizeVolume"}`:             300,
	}
	if len(got) != len(want) {
		t.Errorf("want %d samples\ngot  %d:\n%s", len(want), len(got), text.String())
	}
	for name, value := range want {
		if got[name] != value {
			t.Errorf("%s\nwant %v\ngot  %v", name, value, got[name])
		}
	}
}

func TestVolumesAndConditionsAreCounted(t *testing.T) {
	slow, full := Condition{"DEGRADED", "IOSlow"}, Condition{"DEGRADED", "OutOfSpace"}
	agent := Agent{Version: "1", Calls: new(Calls), Drivers: []string{"blk", "scsi"}, Volumes: []Volume{
		{"blk", nil}, {"blk", []Condition{slow, full}}, {"blk", []Condition{slow}},
	}, Trimmed: 1 << 40}
	text, err := agent.Text()
	if err != nil {
		t.Fatal(err)
	}
	got, err := parse(text)
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	for name, want := range map[string]float64{
		`directvol_agent_info{version="1"}`:                                        1,
		`directvol_agent_volumes{driver="blk"}`:                                    3,
		`directvol_agent_volumes{driver="scsi"}`:                                   0,
		`directvol_agent_volumes_abnormal`:                                         2,
		`directvol_agent_volume_conditions{status="DEGRADED",reason="IOSlow"}`:     2,
		`directvol_agent_volume_conditions{status="DEGRADED",reason="OutOfSpace"}`: 1,
		`directvol_agent_trimmed_bytes_total`:                                      1 << 40,
	} {
		if value, there := got[name]; !there || value != want {
			t.Errorf("%s\nwant %v\ngot  %v in\n%s", name, want, value, text)
		}
	}
}

func TestCountingAllocatesNothing(t *testing.T) {
	var calls Calls
	calls.Of("Check")
	if n := testing.AllocsPerRun(100, func() { calls.Of("Check").Count(codes.OK) }); n != 0 {
		t.Errorf("allocations of one count\nwant 0\ngot  %v", n)
	}
}

func TestLabelsAreEscaped(t *testing.T) {
	var text Text
	text.Family("a", Gauge, "two\nlines of \\")
	text.Sample("a", 0.5, "x", "a \"b\" \\ \n c", "y", "")
	want := "# HELP a two\\nlines of \\\\\n# TYPE a gauge\na{x=\"a \\\"b\\\" \\\\ \\n c\",y=\"\"} 0.5\n"
	if got := text.String(); got != want {
		t.Errorf("\nwant %q\ngot  %q", want, got)
	}
	if _, err := parse(text.String()); err != nil {
		t.Error(err)
	}
}

func TestNumbersAreReadable(t *testing.T) {
	for value, want := range map[float64]string{0: "0", 12345678: "12345678", 0.25: "0.25", 1e300: "1e+300", math.Inf(1): "+Inf"} {
		if got := number(value); got != want {
			t.Errorf("%v\nwant %s\ngot  %s", value, want, got)
		}
	}
}

func TestProcessMetricsHaveTheMemoryOfThisProcess(t *testing.T) {
	var text Text
	if err := WriteProcess(&text); err != nil {
		t.Fatal(err)
	}
	got, err := parse(text.String())
	if err != nil {
		t.Fatal(err)
	}
	page := float64(os.Getpagesize())
	anonymous, resident := got["directvol_agent_anonymous_memory_bytes"], got["directvol_agent_resident_memory_bytes"]
	if anonymous < page || resident < anonymous || got["directvol_agent_threads"] < 1 || got["directvol_agent_goroutines"] < 1 {
		t.Errorf("got\n%s", text.String())
	}
}

func FuzzStatusField(f *testing.F) {
	f.Add("Name:\tx\nRssAnon:\t     123 kB\nThreads:\t1\n")
	f.Add("RssAnon:\t-1 kB\n")
	f.Add("RssAnon: 99999999999999999999 kB")
	f.Add("RssAnon:12")
	f.Fuzz(func(t *testing.T, text string) {
		n, err := statusField(text, "RssAnon", "kB")
		if err == nil && (n >= 1<<48 || !strings.Contains(text, "RssAnon:")) {
			t.Errorf("%q is %d", text, n)
		}
	})
}
