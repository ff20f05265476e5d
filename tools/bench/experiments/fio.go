package experiments

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tools/bench/measure"
)

// workloads maps the suffix of a row's name to fio's options. All workloads use one file, in blocks
// of 4 KiB, one at a time.
var workloads = []struct {
	name, what string
	options    []string
}{
	{"randread", "random reads, past the guest's cache", []string{"--rw=randread", "--direct=1"}},
	{"randwrite", "random writes, past the guest's cache", []string{"--rw=randwrite", "--direct=1"}},
	{"fsync", "random writes with an fsync after each", []string{"--rw=randwrite", "--fsync=1"}},
}

const (
	fioFile = "64M" // the file's size
	fioTime = "1"   // seconds for each timed workload
	// fioOperations is the number of operations of each counted workload.
	fioOperations = 1500
	// fioDisk is the volume's size in bytes.
	fioDisk = 256 << 20
)

var fioByHand = experiment{
	name: "fio on a volume that the agent has mounted, and on the same device mounted by hand",
	// Times of two equal runs differ by more than one percent, so the target is for the number of
	// requests instead: see fioCounted.
	lines: fioLines("fio_", "", "_by_hand", measure.Goal{},
		"4 KiB %s, on an ext4 that the agent has mounted", "the same on the same device, mounted by hand"),
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		f, err := l.theFio(ctx)
		if err != nil {
			return measure.Session{}, err
		}
		passes := []func(context.Context, measure.Trial) error{f.onVolume, f.onBareMount}
		return measure.Session{Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			defer slices.Reverse(passes) // swap the order for the next run, so that a drift of the machine cancels out
			t := measure.Trial{}
			for i, pass := range passes {
				say(fmt.Sprintf("pass %d of %d", i+1, len(passes)))
				if err := pass(ctx, t); err != nil {
					return nil, err
				}
			}
			return t, nil
		}}, nil
	},
}

// fioCounted counts the requests that reach the disk. Their number is the same as by hand, except
// for the agent's own writes and syncs.
var fioCounted = experiment{
	name: "the disk's requests while fio does the same work on a volume that the agent has mounted, and on the same device mounted by hand",
	lines: []measure.Line{
		{Name: "fio_requests", Unit: "requests", Baseline: "fio_requests_by_hand", Goal: measure.AtMost(1.01),
			What: fmt.Sprintf("reads, writes and flushes of the disk for %d operations of each workload on an ext4 that the agent has mounted and watches", fioOperations)},
		{Name: "fio_requests_by_hand", Unit: "requests", What: "the same on the same device, mounted by hand"},
	},
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		f, err := l.theFio(ctx)
		if err != nil {
			return measure.Session{}, err
		}
		return measure.Session{Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			t := measure.Trial{}
			say("on the volume")
			if err := f.byAgent(ctx, func(path string) error { return f.count(ctx, path, "fio_requests", t) }); err != nil {
				return nil, err
			}
			say("by hand")
			return t, f.byHand(ctx, func(path string) error { return f.count(ctx, path, "fio_requests_by_hand", t) })
		}}, nil
	},
}

var fioShared = experiment{
	name: "fio on a volume that the agent has mounted, and on virtio-fs",
	lines: fioLines("fio_", "_virtiofs", "", measure.Goal{},
		"4 KiB %s, on a folder of the same host filesystem shared by virtio-fs", "on an ext4 that the agent has mounted"),
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		f, err := l.theFio(ctx)
		if err != nil {
			return measure.Session{}, err
		}
		end, err := l.share(ctx, f.guest)
		if err != nil {
			return measure.Session{}, err
		}
		return measure.Session{
			Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
				t := measure.Trial{}
				say("on the volume")
				if err := f.onVolume(ctx, t); err != nil {
					return nil, err
				}
				say("on virtio-fs")
				return t, f.run(ctx, sharedPath, "_virtiofs", t)
			},
			Close: end,
		}, nil
	},
}

// fioLines returns two lines per workload: a row with a suffix and a goal, and its baseline.
func fioLines(prefix, suffix, baseline string, g measure.Goal, what, whatBaseline string) (lines []measure.Line) {
	for _, w := range workloads {
		lines = append(lines,
			measure.Line{Name: prefix + w.name + suffix, Unit: "IOPS", Baseline: prefix + w.name + baseline, Goal: g, What: fmt.Sprintf(what, w.what)},
			measure.Line{Name: prefix + w.name + baseline, Unit: "IOPS", What: whatBaseline})
	}
	return lines
}

// fioBed is fio in the guest, with an attached disk.
type fioBed struct {
	*twoWays
	words []string // the first words of its command line
}

// theFio returns fio in the guest, with its file laid out on a volume that experiments share. The
// first experiment brings fio into the guest, where it stays.
func (l *Setup) theFio(ctx context.Context) (f *fioBed, err error) {
	if l.fio != nil {
		return l.fio, nil
	}
	program, err := exec.LookPath("fio")
	if err != nil {
		return nil, measure.Unavailable("%w: install package fio", err)
	}
	version, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return nil, err
	}
	l.machine.Fio = strings.TrimSpace(string(version))
	guest, err := l.theGuest(ctx)
	if err != nil {
		return nil, err
	}
	f = &fioBed{twoWays: &twoWays{guest: guest}}
	if f.words, err = guest.Program(ctx, program); err != nil {
		return nil, err
	}
	f.twoWays, err = l.openTwoWays(ctx, guest.Dir, "fio", fioDisk, func(ctx context.Context, path string) error {
		_, err := f.fio(ctx, path, "--create_only=1")
		return err
	})
	if err != nil {
		return nil, err
	}
	l.fio = f
	return f, nil
}

// onVolume measures on the volume, mounted by the agent.
func (f *fioBed) onVolume(ctx context.Context, t measure.Trial) error {
	return f.byAgent(ctx, func(path string) error { return f.run(ctx, path, "", t) })
}

// onBareMount measures on the same device, mounted by a plain mount(2).
func (f *fioBed) onBareMount(ctx context.Context, t measure.Trial) error {
	return f.byHand(ctx, func(path string) error { return f.run(ctx, path, "_by_hand", t) })
}

// run runs every workload below a path for some time, and adds the results to a trial.
func (f *fioBed) run(ctx context.Context, path, suffix string, t measure.Trial) error {
	jobs, err := f.fio(ctx, path, "--time_based", "--runtime="+fioTime)
	if err != nil {
		return err
	}
	for _, w := range workloads {
		name := "fio_" + w.name + suffix
		t[name] = append(t[name], jobs[w.name])
	}
	return nil
}

// count makes a fixed number of operations of every workload below a path, and adds the disk's
// requests to a row.
func (f *fioBed) count(ctx context.Context, path, row string, t measure.Trial) error {
	before, err := f.requests(ctx)
	if err != nil {
		return err
	}
	if _, err := f.fio(ctx, path, fmt.Sprintf("--number_ios=%d", fioOperations)); err != nil {
		return err
	}
	after, err := f.requests(ctx)
	t[row] = append(t[row], float64(after-before))
	return err
}

// requests returns the number of requests that the guest's kernel has completed on the disk.
func (f *fioBed) requests(ctx context.Context) (uint64, error) {
	path := "/sys/class/block/" + filepath.Base(f.device) + "/stat"
	text, err := f.guest.Remote.ReadFile(ctx, path)
	if err != nil {
		return 0, err
	}
	return parseRequests(string(text))
}

// parseRequests returns the sum of a disk's reads, writes and flushes
// (Documentation/block/stat.rst).
func parseRequests(stat string) (sum uint64, err error) {
	fields := strings.Fields(stat)
	for _, at := range []int{0, 4, 15} {
		if at >= len(fields) {
			return 0, fmt.Errorf("block device statistics %q lack column %d", stat, at)
		}
		n, err := strconv.ParseUint(fields[at], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("block device statistics %q: %w", stat, err)
		}
		sum += n
	}
	return sum, nil
}

// fio runs fio in the guest, one workload after the other, and returns the operations per second of
// each workload.
func (f *fioBed) fio(ctx context.Context, path string, options ...string) (map[string]float64, error) {
	argv := append(slices.Clone(f.words), "--output-format=json", "--thread", "--ioengine=psync", "--bs=4k", "--size="+fioFile, "--filename="+path+"/fio")
	argv = append(argv, options...)
	for _, w := range workloads {
		argv = append(append(argv, "--name="+w.name, "--stonewall"), w.options...)
	}
	done, err := f.guest.Remote.Exec(ctx, remote.Command{Argv: argv})
	if err != nil {
		return nil, err
	}
	if done.Code != 0 {
		return nil, fmt.Errorf("fio in the guest exits %d %s:\n%s%s", done.Code, done.Signal, done.Stderr, done.Stdout)
	}
	return parseFio(done.Stdout)
}

// parseFio reads fio's JSON (its HOWTO, "JSON output") and returns the operations per second of
// each job.
func parseFio(output []byte) (map[string]float64, error) {
	var answer struct {
		Jobs []struct {
			Name        string `json:"jobname"`
			Read, Write struct {
				IOPS float64 `json:"iops"`
			}
		} `json:"jobs"`
	}
	if err := json.Unmarshal(output, &answer); err != nil {
		return nil, fmt.Errorf("fio's answer: %w:\n%.1000s", err, output)
	}
	jobs := map[string]float64{}
	for _, job := range answer.Jobs {
		jobs[job.Name] = job.Read.IOPS + job.Write.IOPS
	}
	return jobs, nil
}
