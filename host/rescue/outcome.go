package rescue

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/directvol/directvol/host/fsck"
)

// check runs a read-only check of the disk on this host after the VM has ended. It claims the disk
// again first, because a check of a disk in use shows nothing.
func (r *rescue) check(ctx context.Context) error {
	r.phase = inCheck
	err := r.step(ctx, "check it, changing nothing", func() (string, error) {
		if err := r.takeBack(); err != nil {
			return "", r.unchecked(err)
		}
		if _, err := r.look(ctx, nil); err != nil {
			return "", r.unchecked(err)
		}
		ctx, cancel := r.limited(ctx)
		defer cancel()
		run, err := fsck.CheckFile(ctx, r.found.fstype, r.Disk, r.disk.File())
		if err != nil {
			return "", r.unchecked(err)
		}
		r.report.Fsck = &run
		if err := run.Err(r.found.fstype); err != nil {
			return "", err
		}
		return run.Command + " finds no errors", nil
	})
	if err != nil {
		if r.report.Fsck != nil {
			err = fmt.Errorf("disk %s mounts, but needs repair: %w\n%s", r.Disk, err, r.mending())
		}
		return err
	}
	after, err := identify(r.disk.File())
	if err != nil {
		return fmt.Errorf("disk %s, after all: %w", r.Disk, err)
	}
	if after.erred {
		return fmt.Errorf("disk %s mounts, but its superblock records an error, so the kernel refuses to grow it: run e2fsck -p %s", r.Disk, r.Disk)
	}
	if err := r.disk.Named(); err != nil {
		return fmt.Errorf("a disk was rescued, but %s is no longer that disk: %w", r.Disk, err)
	}
	return nil
}

// Time limits of a program of package fsck: leastCheck plus checkEach for each GiB of the disk, but
// at most mostCheck for the latter. A limit is necessary because e2fsck can loop forever on a
// damaged filesystem.
const (
	leastCheck = 10 * time.Minute
	checkEach  = time.Minute
	mostCheck  = 7 * 24 * time.Hour
)

// checkLimit returns the time limit for a disk of the given size.
func checkLimit(bytes uint64) time.Duration {
	return leastCheck + time.Duration(min(bytes>>30, uint64(mostCheck/checkEach)))*checkEach
}

// limited returns the context for a run of package fsck.
func (r *rescue) limited(ctx context.Context) (context.Context, context.CancelFunc) {
	limit := r.CheckTimeout
	if limit == 0 {
		bytes, _ := r.disk.File().Seek(0, io.SeekEnd) // 0 after an error; the check then reports the error
		limit = checkLimit(uint64(bytes))
	}
	return context.WithTimeoutCause(ctx, limit, fmt.Errorf("it took longer than %v (--check-timeout)", limit))
}

func (r *rescue) unchecked(err error) error {
	return fmt.Errorf("disk %s was mounted and unmounted, but not checked: %w", r.Disk, err)
}

// mending advises what to do about the findings of a check on a disk whose log is clean.
func (r *rescue) mending() string {
	if r.found.fstype == "ext4" {
		return "run e2fsck -p " + r.Disk + "; if e2fsck asks for more, copy the disk first and continue with the copy"
	}
	return "copy the disk first, then run xfs_repair on the copy; without -L: its log is clean"
}

// wayOut adds the kernel's messages and the remaining options to a refusal to mount.
func (r *rescue) wayOut(err error) error {
	if err == nil {
		return nil
	}
	if !isRefusal(err) { // for example an I/O error, which the kernel's messages explain
		for _, line := range r.said {
			err = fmt.Errorf("%w\n  %s", err, line)
		}
		return err
	}
	text := fmt.Sprintf("disk %s: mount refused by this kernel too (Linux %s): ", r.Disk, r.report.Kernel)
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

// lastResort names the options that discard data, always with what they cost.
func (r *rescue) lastResort() string {
	const whole = "copy the whole disk first and work on the copy"
	if r.found.fstype == "ext4" {
		return whole + ": e2fsck -p replays the journal and makes safe repairs; if it asks for more, e2fsck -y may drop data that it cannot place"
	}
	return whole + ". The log is intact, and another kernel may recover it: a newer one or, if this kernel names an xfs_agf or xfs_agi, one before 6.5 (--kernel, --image). If no kernel mounts it, only xfs_repair is left, " +
		"and on such a disk it needs -L, which discards the log, and with it files that fsync had acknowledged"
}

// recovered determines whether the mount recovered a log. For xfs the kernel's messages say so; for
// ext4 the superblock did before the mount.
func (r *rescue) recovered(mounted bool) {
	if !mounted {
		return
	}
	if r.found.fstype == "ext4" {
		r.report.Recovered = RecoveredNo
		if r.found.replays {
			r.report.Recovered = RecoveredYes
		}
		return
	}
	for _, line := range r.report.KernelLog {
		switch {
		case strings.Contains(line, "Ending recovery"):
			r.report.Recovered = RecoveredYes
			return // the agent may have mounted the disk once more after that
		case strings.Contains(line, "Ending clean mount"):
			r.report.Recovered = RecoveredNo
		}
	}
}

// parentIn parses the parent's number from a process's status (proc(5)); 0 if it is missing.
func parentIn(status string) int {
	for lines := bufio.NewScanner(strings.NewReader(status)); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), "PPid:"); ok {
			parent, _ := strconv.Atoi(strings.TrimSpace(value)) // 0 after an error: no process of interest
			return parent
		}
	}
	return 0
}
