//go:build long

package fuzz

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// minimizeLimit is the time limit for minimizing a new or failing input, because minimizing reduces
// the target's time.
const minimizeLimit = time.Second

// tellEvery is the interval of the progress messages of a target.
const tellEvery = 30 * time.Second

func TestEveryTargetSurvivesItsCampaign(t *testing.T) {
	duration, err := time.ParseDuration(cmp.Or(os.Getenv("FUZZTIME"), "5m"))
	if err != nil || duration < time.Second {
		t.Fatalf("FUZZTIME: want a second or more, such as 5m\ngot  %v, error %v", duration, err)
	}
	only, err := regexp.Compile(os.Getenv("FUZZ"))
	if err != nil {
		t.Fatalf("FUZZ: %v", err)
	}
	targets, err := listTargets()
	if err != nil {
		t.Fatal(err)
	}
	told, err := openReport(filepath.Join(top, "build"), targets)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range targets {
		if !only.MatchString(x.String()) {
			continue
		}
		t.Run(x.String(), func(t *testing.T) {
			t.Parallel()
			r := row{Target: x.String()}
			if err := x.campaign(t, duration, &r); err != nil {
				t.Errorf("want no input that fails\ngot  %v", err)
				r.Failure, _, _ = strings.Cut(err.Error(), "\n")
			} else if r.Covered, err = x.coverage(t); err != nil {
				t.Error(err)
			}
			r.At = time.Now().UTC().Truncate(time.Second)
			t.Logf("%d executions in %.0f s, %d inputs, %d of them new, cover %.1f %% of the package", r.Executions, r.Seconds, r.Inputs, r.New, r.Covered)
			if err := told.put(r); err != nil {
				t.Error(err)
			}
		})
	}
}

// campaign runs a target for a duration, and counts in r. It runs the target again if the engine
// was stopped meanwhile. Its error names the file of a failing input.
func (x target) campaign(t *testing.T, duration time.Duration, r *row) error {
	for left := duration; left > 0; {
		o, err := x.fuzz(t, left)
		r.Executions, r.New, r.Inputs, r.Seconds = r.Executions+o.execs, r.New+o.found, o.held, r.Seconds+o.ran.Seconds()
		left -= max(o.ran, time.Second) // the engine rounds its clock
		switch {
		case err == nil, o.tooLate():
		case o.crasher != "" && o.stopped && x.passes(t, o.crasher):
			// The engine's limit of 10 s for one input ran out while the engine was stopped.
			if err := os.Remove(filepath.Join(top, x.dir, o.crasher)); err != nil {
				return err
			}
		case o.crasher != "":
			return fmt.Errorf("%s, to be run again with go test -run '^%s$/^%s$' ./%s\n%s",
				filepath.Join(x.dir, o.crasher), x.name, filepath.Base(o.crasher), x.dir, strings.Join(o.rest, "\n"))
		default:
			return fmt.Errorf("%w, and no input:\n%s", err, strings.Join(o.rest, "\n"))
		}
	}
	return nil
}

// fuzz makes the engine run the target once.
func (x target) fuzz(t *testing.T, duration time.Duration) (o output, err error) {
	cmd := x.command(t.Context(), "go", "test", "-vet=off", "-timeout=0", "-run=^$", "-fuzz=^"+x.name+"$", "-fuzztime="+duration.String(), "-fuzzminimizetime="+minimizeLimit.String(), "-parallel=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		return o, err
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return o, err
	}
	lines, due := bufio.NewScanner(out), tellEvery
	lines.Buffer(nil, 16<<20) // a failure prints its whole input
	for lines.Scan() {
		if o.read(lines.Text()) && o.ran >= due {
			t.Logf("%v of %v: %d executions, %d new inputs", o.ran, duration, o.execs, o.found)
			due += tellEvery
		}
	}
	return o, errors.Join(lines.Err(), cmd.Wait())
}

// passes runs one input.
func (x target) passes(t *testing.T, input string) bool {
	return x.command(t.Context(), "go", "test", "-vet=off", "-count=1", "-run=^"+x.name+"$/^"+filepath.Base(input)+"$").Run() == nil
}

// command returns a command that runs in the target's package.
func (x target) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = filepath.Join(top, x.dir)
	return cmd
}

var coverageLine = regexp.MustCompile(`(?m)^coverage: ([0-9.]+)% of statements`)

// coverage runs the target with its seeds and the inputs in go's cache, and returns the percentage
// of its package's statements that they cover.
func (x target) coverage(t *testing.T) (percent float64, err error) {
	temp := t.TempDir()
	program := filepath.Join(temp, "target.test")
	if out, err := x.command(t.Context(), "go", "test", "-vet=off", "-c", "-cover", "-o", program).CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build %s for its coverage: %w: %s", x, err, out)
	}
	if err := x.copyInputs(t.Context(), temp); err != nil {
		return 0, err
	}
	cmd := exec.CommandContext(t.Context(), program, "-test.run=^"+x.name+"$", "-test.coverprofile="+filepath.Join(temp, "profile"))
	cmd.Dir = temp
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("run %s over all its inputs: %w: %.4000s", x, err, out)
	}
	m := coverageLine.FindSubmatch(out)
	if m == nil {
		return 0, fmt.Errorf("run %s over all its inputs: no coverage in %.1000q", x, out)
	}
	return strconv.ParseFloat(string(m[1]), 64)
}

// copyInputs copies the package's testdata, and adds the inputs that the engine has kept in go's
// cache.
func (x target) copyInputs(ctx context.Context, to string) error {
	if err := os.CopyFS(filepath.Join(to, "testdata"), os.DirFS(filepath.Join(top, x.dir, "testdata"))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	out, err := x.command(ctx, "go", "list", "-f", "{{.ImportPath}}").Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	cache, err := x.command(ctx, "go", "env", "GOCACHE").Output()
	if err != nil {
		return fmt.Errorf("go env GOCACHE: %w", err)
	}
	kept := filepath.Join(strings.TrimSpace(string(cache)), "fuzz", strings.TrimSpace(string(out)), x.name)
	inputs, err := os.ReadDir(kept)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	seeds := filepath.Join(to, "testdata/fuzz", x.name)
	if err := os.MkdirAll(seeds, 0o755); err != nil {
		return err
	}
	for _, input := range inputs {
		text, err := os.ReadFile(filepath.Join(kept, input.Name()))
		if err == nil {
			err = os.WriteFile(filepath.Join(seeds, "kept-"+input.Name()), text, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
