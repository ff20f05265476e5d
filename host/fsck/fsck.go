// Package fsck checks an unmounted filesystem with the programs of e2fsprogs, xfsprogs and
// btrfs-progs, and decides by their output whether anything needs repair: e2fsck(8), xfs_repair(8),
// btrfs-check(8). The caller must make sure that nothing else uses the disk, and must set a time
// limit, because on a damaged filesystem these programs may run forever.
//
// The programs end no later than this process. A Ctrl-C on the terminal does not reach them; the
// context ends them.
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

// Run is one run of a program on a disk, with its result.
type Run struct {
	Command string `json:"command"`
	Exit    int    `json:"exit"`
	// Output is the program's standard output and error, safe for a terminal.
	Output string `json:"output"`
}

// checker is a program that checks a filesystem without changing it. An exit status of 0 is not
// enough: e2fsck -fn answers its own questions with no and may still exit 0, for example with wrong
// counts of free blocks. So certain words in the output count as an error too. They are ignored in
// lines that show no fault: the one with the filesystem's label or the disk's name, which may be
// any words (the last one of e2fsck, the first one of btrfs; xfs_repair shows neither if nothing
// needs repair), and those in which e2fsck offers to make a fragmented file's extent tree smaller.
type checker struct {
	argv     []string
	wrong    []string
	harmless *regexp.Regexp // matches those lines; nil if the program shows none
	deb      string         // the Debian package that contains the program
}

var e2fsck = checker{
	[]string{"e2fsck", "-fn"}, []string{"? no", "WARNING"}, regexp.MustCompile(
		`: \d+/\d+ files \([0-9.]+% non-contiguous\), \d+/\d+ blocks$` +
			`|^Inode \d+ extent tree \(at level \d+\) could be (narrower|shorter)\.  Optimize\? no$`), "e2fsprogs",
}

var checkers = map[string]checker{
	"btrfs": {[]string{"btrfs", "check", "--readonly"}, []string{"ERROR", "WARNING"}, regexp.MustCompile(`^Checking filesystem on `), "btrfs-progs"},
	"ext3":  e2fsck,
	"ext4":  e2fsck,
	"xfs":   {[]string{"xfs_repair", "-n"}, []string{"would "}, nil, "xfsprogs"},
}

func checkerOf(fstype string) (checker, error) {
	c, ok := checkers[fstype]
	if !ok {
		return checker{}, fmt.Errorf("no check is known for %s", fstype)
	}
	return c, nil
}

// Available returns nil if the check of a filesystem can run on this host. Otherwise the error
// names the package to install.
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

// find looks for a program in PATH, and in the sbin directories that are not in an ordinary user's
// PATH.
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

// Check runs the check of a filesystem on an image or a device. Run.Err reports the findings; the
// error returned here means that the check could not run.
func Check(ctx context.Context, fstype, disk string) (Run, error) {
	c, err := checkerOf(fstype)
	if err != nil {
		return Run{}, err
	}
	return start(ctx, c.argv, disk, nil)
}

// CheckFile is Check on an open disk, even if its name now leads elsewhere. The Run contains the
// name, so that the command can be repeated.
func CheckFile(ctx context.Context, fstype, name string, disk *os.File) (Run, error) {
	c, err := checkerOf(fstype)
	if err != nil {
		return Run{}, err
	}
	return start(ctx, c.argv, name, disk)
}

// Repair runs e2fsck to repair an ext4 image without questions. Exit status 1 means that e2fsck has
// repaired something, which is not a failure.
func Repair(ctx context.Context, disk string) (Run, error) { return repair(ctx, disk, nil) }

// RepairFile is Repair on an open disk, as CheckFile is to Check.
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

// endLimit is how long a program may take to end after SIGTERM.
const endLimit = 10 * time.Second

// inherited is the path under which a program finds the first file that it inherits.
const inherited = "/proc/self/fd/3"

// start runs a program on the disk with the given name, or on open if that is not nil.
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
	cmd := command(ctx, program, append(argv[1:len(argv):len(argv)], target)...)
	cmd.Stdout, cmd.Stderr = &out, &out
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

// command returns a command that gets SIGTERM when ctx ends.
func command(ctx context.Context, program string, arguments ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, program, arguments...)
	cmd.Env = append(os.Environ(), "LC_ALL=C") // Err looks for English words
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	// On SIGTERM e2fsck stops at a safe place. It is killed only if it does not stop.
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.WaitDelay = endLimit
	return cmd
}

// runOnThread runs a command from a thread that stays until the command has ended, because the
// kernel sends Pdeathsig when the forking thread ends.
func runOnThread(cmd *exec.Cmd) error {
	ended := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		ended <- cmd.Run()
	}()
	return <-ended
}

// Err returns nil if the check found nothing to repair. The error includes the beginning of the
// output.
func (r Run) Err(fstype string) error {
	if r.Exit != 0 {
		return fmt.Errorf("%s exits %d:\n%s", r.Command, r.Exit, beginning(r.Output))
	}
	c := checkers[fstype]
	for line := range strings.Lines(r.Output) {
		line = strings.TrimSpace(line)
		if c.harmless != nil && c.harmless.MatchString(line) {
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

// shownLines and shownBytes limit the output in an error. The Run has the output that was kept.
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

// printable makes a program's output safe for a terminal and for JSON. The output contains names
// and labels from the filesystem, which are untrusted bytes.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) || r == '\n' {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(text, "?"))
}

// maxOutput limits the kept output in bytes. A check without findings prints little; a check of a
// ruined filesystem may print something for each block.
const maxOutput = 256 << 10

// cut is the last line of an output that was longer than maxOutput.
const cut = "(the rest of the output was dropped)"

// output keeps the beginning of the data written to it.
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

// String returns the kept output, with a note at its end if some was dropped.
func (o *output) String() string {
	if o.over {
		return o.text.String() + "\n" + cut + "\n"
	}
	return o.text.String()
}
