package rescue

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/directvol/directvol/host/fsck"
)

// check looks at the disk that the VM has left, on this host and without touching
// it. It is claimed once more before: a check of a disk in use shows nothing.
func (r *rescue) check(ctx context.Context) error {
	r.phase = inCheck
	err := r.step(ctx, "check it, changing nothing", func() (string, error) {
		if err := r.disk.Lock(); err != nil {
			return "", r.unchecked(err)
		}
		if _, err := r.look(ctx, nil); err != nil {
			return "", r.unchecked(err)
		}
		ctx, cancel := context.WithTimeoutCause(ctx, checkLimit, errSlowCheck)
		defer cancel()
		run, err := fsck.CheckFile(ctx, r.found.fstype, r.Disk, r.disk.File())
		if err != nil {
			return "", r.unchecked(explained(ctx, err))
		}
		run.Output = printableLines(run.Output)
		r.report.Fsck = &run
		if err := run.Err(r.found.fstype); err != nil {
			return "", errors.New(beginning(err.Error()))
		}
		return run.Command + " finds nothing to mend", nil
	})
	if err != nil {
		if r.report.Fsck != nil {
			err = fmt.Errorf("disk %s mounts, but there is something to mend: %w\n%s", r.Disk, err, r.mending())
		}
		return err
	}
	if err := r.stillNamed(); err != nil {
		return err
	}
	after, err := identify(r.disk.File())
	if err != nil {
		return fmt.Errorf("disk %s, after all: %w", r.Disk, err)
	}
	if after.erred {
		return fmt.Errorf("disk %s mounts, but its superblock remembers an error, and the kernel refuses to grow it: run e2fsck -p %s", r.Disk, r.Disk)
	}
	return nil
}

// checkLimit ends a check that goes round in circles, as e2fsck can on a damaged
// disk; a sound one of many terabytes takes less.
const checkLimit = time.Hour

var errSlowCheck = fmt.Errorf("it took longer than %v and was ended", checkLimit)

// stillNamed refuses success for a disk that its name leads to no more.
func (r *rescue) stillNamed() error {
	ours, err := r.disk.File().Stat()
	if err != nil {
		return err
	}
	named, err := os.Stat(r.Disk)
	if err == nil && os.SameFile(ours, named) {
		return nil
	}
	return fmt.Errorf("what was named %s when it was opened is rescued, but the name leads elsewhere by now, or nowhere: somebody has moved or replaced it", r.Disk)
}

func (r *rescue) unchecked(err error) error {
	return fmt.Errorf("disk %s was mounted and unmounted, but not checked: %w", r.Disk, err)
}

// mending is what can be done about what a check has found on a disk whose log is clean.
func (r *rescue) mending() string {
	if r.found.fstype == "ext4" {
		return "run e2fsck -p " + r.Disk + "; where that asks for more, copy the disk first and go on with the copy"
	}
	return "copy the disk first, then run xfs_repair on the copy; without -L: its log is clean"
}

// wayOut adds to a refusal to mount what the kernel said, and what is left to try.
func (r *rescue) wayOut(err error) error {
	if !isRefusal(err) {
		return err
	}
	text := fmt.Sprintf("mount refused by this kernel too (Linux %s): ", r.report.Kernel)
	said := ""
	for _, line := range r.report.KernelLog {
		said += "\n  " + line
	}
	if said != "" {
		said = "\nthe kernel said:" + said
	}
	if r.tried != "" {
		said += "\n" + r.tried
	}
	return fmt.Errorf("%s%w%s\n%s", text, err, said, r.lastResort())
}

// lastResort names what throws things away only together with its price.
func (r *rescue) lastResort() string {
	const whole = "copy the whole disk first, and work on the copy"
	if r.found.fstype == "ext4" {
		return whole + ": e2fsck -p replays the journal and mends what is safe to mend; where it asks for more, e2fsck -y may drop what it cannot place"
	}
	return whole + ". The log is still there, and a still newer kernel may recover it (--kernel, --image). Where no kernel mounts it xfs_repair is left, " +
		"and on such a disk it wants -L: that throws the log away, and with it files that fsync had acknowledged"
}

// recovered finds out whether the mount has recovered a log. The kernel says it
// of xfs, an ext4's superblock has said it before.
func (r *rescue) recovered(mounted bool) {
	if !mounted {
		return
	}
	if r.found.fstype == "ext4" {
		r.report.Recovered = RecoveredNo
		if r.found.replays {
			r.report.Recovered = RecoveredYes // by the kernel or, see Repair, e2fsck
		}
		return
	}
	for _, line := range r.report.KernelLog {
		switch {
		case strings.Contains(line, "Ending recovery"):
			r.report.Recovered = RecoveredYes
			return // the agent may have mounted it once more after that
		case strings.Contains(line, "Ending clean mount"):
			r.report.Recovered = RecoveredNo
		}
	}
}

// shownLines is how much of a check's output an error shows: the report has all of it.
const shownLines = 20

func beginning(text string) string {
	text = strings.TrimRight(text, "\n")
	lines := strings.SplitAfterN(text, "\n", shownLines+1)
	if len(lines) <= shownLines {
		return text
	}
	return strings.Join(lines[:shownLines], "") + "…"
}

// printableLines is printable of each line.
func printableLines(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = printable(line)
	}
	return strings.Join(lines, "\n")
}

// parentIn reads a process's parent from its status (proc(5)), 0 where it is not there.
func parentIn(status string) int {
	for lines := bufio.NewScanner(strings.NewReader(status)); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), "PPid:"); ok {
			parent, _ := strconv.Atoi(strings.TrimSpace(value)) // 0 is nobody's child
			return parent
		}
	}
	return 0
}
