package vm

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
)

// Fsck is one run of a filesystem check on a detached disk.
type Fsck struct {
	Command string `json:"command"`
	Exit    int    `json:"exit"`
	Output  string `json:"output"`
}

// checkers are the programs that look without touching, and what their output
// must not hold. An exit status of 0 is not enough: e2fsck -fn answers its own
// questions with no and may still exit 0, on wrong counts of free blocks for one.
var checkers = map[string]struct {
	argv  []string
	wrong []string
}{
	"ext4": {[]string{"e2fsck", "-fn"}, []string{"? no", "WARNING"}},
	"xfs":  {[]string{"xfs_repair", "-n"}, []string{"would "}},
}

// Check runs the check of a filesystem on an image. Err tells what it found;
// the error here is that of a check that could not run.
func Check(ctx context.Context, fstype, image string) (Fsck, error) {
	checker, ok := checkers[fstype]
	if !ok {
		return Fsck{}, fmt.Errorf("no check is known for %s", fstype)
	}
	return run(ctx, append(checker.argv, image))
}

// Repair has e2fsck mend an ext4 image without asking. It exits 1 where it has
// mended something, which is no failure.
func Repair(ctx context.Context, image string) (Fsck, error) {
	fsck, err := run(ctx, []string{"e2fsck", "-p", image})
	if err == nil && fsck.Exit > 1 {
		err = fmt.Errorf("%s exits %d:\n%s", fsck.Command, fsck.Exit, fsck.Output)
	}
	return fsck, err
}

func run(ctx context.Context, argv []string) (Fsck, error) {
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	fsck := Fsck{Command: strings.Join(argv, " "), Output: string(out)}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() {
		fsck.Exit = exit.ExitCode()
		return fsck, nil
	}
	if err != nil {
		return fsck, fmt.Errorf("%s: %w", fsck.Command, err)
	}
	return fsck, nil
}

// Err is nil where the check found nothing to mend.
func (f Fsck) Err(fstype string) error {
	if f.Exit != 0 {
		return fmt.Errorf("%s exits %d:\n%s", f.Command, f.Exit, f.Output)
	}
	for line := range strings.Lines(f.Output) {
		for _, wrong := range checkers[fstype].wrong {
			if strings.Contains(line, wrong) {
				return fmt.Errorf("%s exits 0 and says: %s", f.Command, strings.TrimSpace(line))
			}
		}
	}
	return nil
}
