// Package fsck has the programs of e2fsprogs and xfsprogs look at a filesystem
// that nobody has mounted, and knows what of their answers means that there is
// nothing to mend: e2fsck(8), xfs_repair(8). That nobody has the disk is for the
// caller to see to, and so is a limit: on a damaged filesystem they may go on for ever.
//
// The programs live no longer than this process, and a Ctrl-C on the terminal does
// not reach them: it is the context that ends them.
package fsck

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"
	"unicode"

	"golang.org/x/sys/unix"
)

// Run is one run of a program on a disk.
type Run struct {
	Command string `json:"command"`
	Exit    int    `json:"exit"`
	// Output is what the program said on both its outputs, fit for a terminal.
	Output string `json:"output"`
}

// checker is a program that looks without touching. An exit status of 0 is not
// enough: e2fsck -fn answers its own questions with no and may still exit 0, on
// wrong counts of free blocks for one. So its output must not hold some words, but
// in the line that ends it: there e2fsck has the filesystem's label, or the disk's
// name, which may be any words. xfs_repair shows neither where there is nothing to mend.
type checker struct {
	argv  []string
	wrong []string
	ends  *regexp.Regexp // nil where no line has a label
	deb   string         // the package of Debian that has it
}

var checkers = map[string]checker{
	"ext4": {[]string{"e2fsck", "-fn"}, []string{"? no", "WARNING"}, regexp.MustCompile(`: \d+/\d+ files \([0-9.]+% non-contiguous\), \d+/\d+ blocks$`), "e2fsprogs"},
	"xfs":  {[]string{"xfs_repair", "-n"}, []string{"would "}, nil, "xfsprogs"},
}

func checkerOf(fstype string) (checker, error) {
	c, ok := checkers[fstype]
	if !ok {
		return checker{}, fmt.Errorf("no check is known for %s", fstype)
	}
	return c, nil
}

// Available is nil where the check of a filesystem can run on this host. The
// error names the package that has its program.
func Available(fstype string) error {
	c, err := checkerOf(fstype)
	if err != nil {
		return err
	}
	if _, err := find(c.argv[0]); err != nil {
		return fmt.Errorf("%w: install it with: apt-get install --no-install-recommends %s", err, c.deb)
	}
	return nil
}

// find looks in PATH, and where PATH of an ordinary user does not lead.
func find(program string) (string, error) {
	path, err := exec.LookPath(program)
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if err == nil {
			break
		}
		if found, sbinErr := exec.LookPath(filepath.Join(dir, program)); sbinErr == nil {
			return found, nil
		}
	}
	return path, err
}

// Check runs the check of a filesystem on an image or a device. Err tells what it
// found; the error here is that of a check that could not run.
func Check(ctx context.Context, fstype, disk string) (Run, error) {
	c, err := checkerOf(fstype)
	if err != nil {
		return Run{}, err
	}
	return start(ctx, c.argv, disk, nil)
}

// CheckFile is Check on a disk that is open, whatever its name leads to by now.
// The Run has that name all the same, so that it can be repeated.
func CheckFile(ctx context.Context, fstype, name string, disk *os.File) (Run, error) {
	c, err := checkerOf(fstype)
	if err != nil {
		return Run{}, err
	}
	return start(ctx, c.argv, name, disk)
}

// Repair has e2fsck mend an ext4 image without asking. It exits 1 where it has
// mended something, which is no failure.
func Repair(ctx context.Context, disk string) (Run, error) { return repair(ctx, disk, nil) }

// RepairFile is Repair on a disk that is open, as CheckFile is Check.
func RepairFile(ctx context.Context, name string, disk *os.File) (Run, error) {
	return repair(ctx, name, disk)
}

func repair(ctx context.Context, name string, disk *os.File) (Run, error) {
	run, err := start(ctx, []string{"e2fsck", "-p"}, name, disk)
	if err == nil && run.Exit > 1 {
		err = fmt.Errorf("%s exits %d:\n%s", run.Command, run.Exit, beginning(run.Output))
	}
	return run, err
}

// endLimit is how long a program may take from SIGTERM to its end.
const endLimit = 10 * time.Second

// inherited is the name that a program has for the first file it inherits.
const inherited = "/proc/self/fd/3"

// start runs a program on the disk of that name, or on one that is open.
func start(ctx context.Context, argv []string, name string, open *os.File) (Run, error) {
	run := Run{Command: strings.Join(append(argv[:len(argv):len(argv)], name), " ")}
	program, err := find(argv[0])
	if err != nil {
		return run, err
	}
	target := name
	if open != nil {
		target = inherited
	}
	var out output
	cmd := exec.CommandContext(ctx, program, append(argv[1:len(argv):len(argv)], target)...)
	cmd.Env = append(os.Environ(), "LC_ALL=C") // its words are looked for
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	// e2fsck ends at a safe place then, and is killed only where it does not.
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.WaitDelay = endLimit
	if open != nil {
		cmd.ExtraFiles = []*os.File{open}
	}
	err = runOnThread(cmd)
	run.Output = printable(out.String())
	if open != nil {
		run.Output = strings.ReplaceAll(run.Output, inherited, name)
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() {
		run.Exit = exit.ExitCode()
		return run, nil
	}
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return run, fmt.Errorf("%s: %w", run.Command, err)
	}
	return run, nil
}

// runOnThread runs a command from a thread that stays until it has ended: the kernel
// sends Pdeathsig when the thread that forked ends.
func runOnThread(cmd *exec.Cmd) error {
	ended := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		ended <- cmd.Run()
	}()
	return <-ended
}

// Err is nil where the check found nothing to mend. It shows the output's beginning.
func (r Run) Err(fstype string) error {
	if r.Exit != 0 {
		return fmt.Errorf("%s exits %d:\n%s", r.Command, r.Exit, beginning(r.Output))
	}
	c := checkers[fstype]
	for line := range strings.Lines(r.Output) {
		line = strings.TrimSpace(line)
		if c.ends != nil && c.ends.MatchString(line) {
			continue
		}
		for _, wrong := range append([]string{cut}, c.wrong...) {
			if strings.Contains(line, wrong) {
				return fmt.Errorf("%s exits 0 and says: %s", r.Command, beginning(line))
			}
		}
	}
	return nil
}

// shownLines and shownBytes bound what an error shows of an output: the Run has all of it.
const (
	shownLines = 20
	shownBytes = 4 << 10
)

func beginning(text string) string {
	text = strings.TrimRight(text, "\n")
	short := text
	if lines := strings.SplitAfterN(text, "\n", shownLines+1); len(lines) > shownLines {
		short = strings.Join(lines[:shownLines], "")
	}
	if len(short) > shownBytes {
		short = strings.ToValidUTF8(short[:shownBytes], "")
	}
	if len(short) < len(text) {
		short += "…"
	}
	return short
}

// printable makes a program's lines fit for a terminal and for JSON: they show names
// and labels of the filesystem, which are a stranger's bytes.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) || r == '\n' {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(text, "?"))
}

// maxOutput is what is kept of a program's output. A check that finds nothing
// says little; one of a ruined filesystem may say something of each block.
const maxOutput = 256 << 10

// cut is the last line of an output that was longer.
const cut = "(the rest of the output was dropped)"

// output keeps the beginning of what is written to it.
type output struct {
	text strings.Builder
	over bool
}

func (o *output) Write(p []byte) (int, error) {
	room := maxOutput - o.text.Len()
	o.over = o.over || len(p) > room
	o.text.Write(p[:min(len(p), room)])
	return len(p), nil
}

// String returns what was kept, and says so where that is not all.
func (o *output) String() string {
	if o.over {
		return o.text.String() + "\n" + cut + "\n"
	}
	return o.text.String()
}
