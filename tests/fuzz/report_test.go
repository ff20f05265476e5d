package fuzz

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// row is the report on a target.
type row struct {
	Target     string    `json:"target"`
	Executions int       `json:"executions"`
	Seconds    float64   `json:"seconds"` // duration of the run
	New        int       `json:"new_inputs"`
	Inputs     int       `json:"inputs"`  // all inputs: seeds, and those of this and of earlier campaigns
	Covered    float64   `json:"covered"` // percentage of its package's statements that all inputs cover
	Failure    string    `json:"failure,omitempty"`
	At         time.Time `json:"at"`
}

func (r row) perSecond() float64 {
	if r.Seconds == 0 {
		return 0
	}
	return float64(r.Executions) / r.Seconds
}

// report keeps one row per target in dir/fuzz.json and dir/fuzz.md.
type report struct {
	dir string

	mu   sync.Mutex
	rows map[string]row
}

// openReport reads the rows of an earlier campaign, for the targets that still exist.
func openReport(dir string, targets []target) (*report, error) {
	r := &report{dir: dir, rows: map[string]row{}}
	text, err := os.ReadFile(filepath.Join(dir, "fuzz.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return r, os.MkdirAll(dir, 0o755)
	}
	if err != nil {
		return nil, err
	}
	var rows []row
	if err := json.Unmarshal(text, &rows); err != nil {
		return nil, fmt.Errorf("%s/fuzz.json: %w: remove it to begin anew", dir, err)
	}
	for _, old := range rows {
		if slices.ContainsFunc(targets, func(x target) bool { return x.String() == old.Target }) {
			r.rows[old.Target] = old
		}
	}
	return r, nil
}

// put adds a row, or replaces it, and writes both files.
func (r *report) put(added row) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rows[added.Target] = added
	var rows []row
	for _, old := range r.rows {
		rows = append(rows, old)
	}
	slices.SortFunc(rows, func(a, b row) int { return strings.Compare(a.Target, b.Target) })
	text, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(r.dir, "fuzz.json"), append(text, '\n'), 0o644),
		os.WriteFile(filepath.Join(r.dir, "fuzz.md"), []byte(table(rows)), 0o644))
}

func table(rows []row) string {
	var b strings.Builder
	b.WriteString("| target | time | executions | a second | new inputs | all inputs | covered | result |\n|---|---:|---:|---:|---:|---:|---:|---|\n")
	var executions int
	var seconds float64
	for _, r := range rows {
		result := "none failed"
		if r.Failure != "" {
			result = "**failed**: " + r.Failure
		}
		executions, seconds = executions+r.Executions, seconds+r.Seconds
		fmt.Fprintf(&b, "| %s | %.0f s | %d | %.0f | %d | %d | %.1f %% | %s |\n", r.Target, r.Seconds, r.Executions, r.perSecond(), r.New, r.Inputs, r.Covered, result)
	}
	fmt.Fprintf(&b, "| all %d | %.0f s | %d | | | | | |\n", len(rows), seconds, executions)
	b.WriteString("\nInputs: seeds, and what this campaign and earlier ones found. Covered: statements of the target's own package, by all inputs.\n")
	return b.String()
}

func TestReportKeepsTheRowsOfTargetsThatWereLeftOut(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "build")
	first, second := target{"a", "FuzzA"}, target{"b", "FuzzB"}
	for _, now := range []struct {
		targets []target
		add     row
		want    []string
	}{
		{[]target{first, second}, row{Target: "a.FuzzA", Executions: 10, Seconds: 5}, []string{"| a.FuzzA | 5 s | 10 | 2 |"}},
		{[]target{first, second}, row{Target: "b.FuzzB", Failure: "b/testdata/fuzz/FuzzB/1"}, []string{"| a.FuzzA | 5 s | 10 | 2 |", "| b.FuzzB | 0 s |", "FuzzB/1", "| all 2 | 5 s | 10 |"}},
		{[]target{second}, row{Target: "b.FuzzB", Executions: 7, Seconds: 1}, []string{"| b.FuzzB | 1 s | 7 | 7 |", "| all 1 | 1 s | 7 |"}},
	} {
		r, err := openReport(dir, now.targets)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.put(now.add); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(dir, "fuzz.md"))
		for _, want := range now.want {
			if err != nil || !strings.Contains(string(got), want) {
				t.Errorf("want %q\ngot  %s, error %v", want, got, err)
			}
		}
	}
}
