package rescue

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/holders"
	"github.com/directvol/directvol/host/rescue"
	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// attempts is the maximum number of volumes that are cut until one has the fault, which depends on
// the moment. When the fault was first seen, every volume had it.
const attempts = 4

// The course of one volume: it is cut off, refused by its sandbox's kernel, left alone by rescue
// while a sandbox has it, and rescued intact after two interrupted attempts. The older kernel only
// mounts copies of the volume, so the newer kernel recovers an image that nothing has changed since
// the cut.
func TestVolumeThatWasCutOffWhileItGrewIsRescuedWhole(t *testing.T) {
	c := refusedVolume(t, 1, func() cut { return cutOff(t, grownOnce) })
	interrupted(t, c, "boot a VM", "before the disk was touched")
	interrupted(t, c, "mount it", "run rescue again")
	report, said, exit := run(t, vmtest.Within(t, vmtest.JobLimit), c.Path)
	if exit != 0 || !report.Mounted || report.Recovered != rescue.RecoveredYes || report.FSType != "xfs" || report.Error != "" || report.Superblock != nil {
		t.Fatalf("rescue\nwant exit 0, an xfs whose log was recovered, and nothing written by hand\ngot  exit %d, %+v\n%s", exit, report, said)
	}
	vmtest.Must(t, report.Fsck.Err("xfs"))
	t.Logf("%s%+v", said, report)
	isWhole(t, c, keptOut)
}

// isWhole makes the kernel of the cut mount a volume, and checks its content.
func isWhole(t *testing.T, c cut, before func(*testing.T, context.Context, *vm.Guest, sandbox.Volume)) {
	t.Helper()
	ctx := vmtest.Within(t, vmtest.JobLimit)
	g := vmtest.Boot(t, vm.Options{})
	defer g.Kill()
	if before != nil {
		before(t, ctx, g, c.Volume)
	}
	vmtest.Must(t, g.Attach(ctx, c.Volume))
	mounted, err := g.Mount(ctx, c.ID)
	vmtest.Must(t, err)
	c.verify(t, ctx, g, mounted)
	fs, err := g.Remote.StatFS(ctx, mounted)
	vmtest.Must(t, err)
	const logBytes = 64 * miB // the log is no part of it
	if size := fs.Blocks * uint64(fs.BlockSize); size < c.bytes-logBytes {
		t.Errorf("the filesystem\nwant it grown, about %d bytes\ngot  %d", c.bytes, size)
	}
	vmtest.Must(t, g.Detach(ctx, c.ID))
	check, err := vm.Check(ctx, "xfs", c.Path)
	vmtest.Must(t, err)
	vmtest.Must(t, check.Err("xfs"))
}

// keptOut checks that rescue's claim on a disk makes a sandbox's QEMU fail, and that QEMU gets the
// disk afterwards.
func keptOut(t *testing.T, ctx context.Context, g *vm.Guest, v sandbox.Volume) {
	t.Helper()
	d, err := holders.Open(v.Path)
	vmtest.Must(t, err)
	defer d.Close()
	vmtest.Must(t, d.Claim())
	if err := g.Attach(ctx, v); err == nil || !strings.Contains(err.Error(), "lock") {
		t.Errorf("a sandbox that wants a disk that rescue has\nwant QEMU to refuse it for its lock\ngot  %v", err)
	}
}

// refusedVolume returns a volume after a cut whose copies the guest's kernel refuses to mount, the
// given number of times in a row. The sandbox of the last attempt still has its disk when rescue is
// called for the first time.
func refusedVolume(t *testing.T, times int, cutOff func() cut) cut {
	t.Helper()
	for range attempts {
		c := cutOff()
		if c.copied(t).isRefused(t, times) {
			return c
		}
	}
	t.Fatalf("%d volumes were grown and cut off, and all of them mount: the fault that rescue is for was not met", attempts)
	return cut{}
}

func (c cut) isRefused(t *testing.T, times int) bool {
	t.Helper()
	ctx := vmtest.Within(t, vmtest.JobLimit)
	g := vmtest.Boot(t, vm.Options{})
	defer g.Kill()
	vmtest.Must(t, g.Attach(ctx, c.Volume))
	awaitSize(t, ctx, g, c.bytes)
	for i := range times {
		err := bareMount(t, ctx, g)
		if err == nil {
			t.Logf("this volume was not met by the fault: attempt %d mounts it", i+1)
			return false
		}
		if !errors.Is(err, unix.EUCLEAN) {
			t.Fatalf("mount\nwant EUCLEAN\ngot  %v", err)
		}
		t.Logf("the kernel that the volume was cut under, attempt %d: %v", i+1, err)
	}
	leavesAlone(t, ctx, c.Path)
	if times > 1 {
		namesTheWayOut(t, ctx, g, c)
	}
	// This result depends on the older kernel, and rescue does not rely on it. So it is only
	// logged.
	t.Logf("the same kernel once more: error %v", bareMount(t, ctx, g))
	return true
}

// namesTheWayOut makes the agent mount a volume that its kernel refuses, and checks that the error
// says how to recover.
func namesTheWayOut(t *testing.T, ctx context.Context, g *vm.Guest, c cut) {
	t.Helper()
	_, err := g.Mount(ctx, c.ID)
	if err == nil {
		t.Fatal("the agent has mounted what its kernel refuses")
	}
	for _, words := range []string{c.Path, "structure needs cleaning", "its growth from", "directvol rescue DISK"} {
		if !strings.Contains(err.Error(), words) {
			t.Errorf("the agent's refusal\nwant it to say %q\ngot  %v", words, err)
		}
	}
	t.Log(err)
}

// leavesAlone runs rescue on a disk that a sandbox uses, and checks that rescue refuses.
func leavesAlone(t *testing.T, ctx context.Context, disk string) {
	t.Helper()
	link := filepath.Join(t.TempDir(), "link")
	vmtest.Must(t, os.Symlink(disk, link))
	before := sum(t, disk)
	report, said, exit := run(t, ctx, link)
	// The sandbox's own process has the disk open too.
	named := slices.ContainsFunc(report.Holders, func(h holders.Holder) bool { return strings.HasPrefix(h.Program, "qemu-system") })
	if exit != 1 || report.Mounted || !named {
		t.Errorf("rescue of a disk that a sandbox has\nwant it refused, and QEMU named\ngot  exit %d, %+v\n%s", exit, report, said)
	}
	if sum(t, disk) != before {
		t.Error("the disk was changed")
	}
	// QEMU's own lock is enough if its process is not visible.
	d, err := holders.Open(disk)
	vmtest.Must(t, err)
	defer d.Close()
	if err := d.Claim(); err == nil || !strings.Contains(err.Error(), "QEMU's image lock") {
		t.Errorf("claim\nwant it refused for QEMU's image lock\ngot  %v", err)
	}
	t.Log(report.Error)
}

func sum(t *testing.T, path string) (sum [sha256.Size]byte) {
	t.Helper()
	f, err := os.Open(path)
	vmtest.Must(t, err)
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	vmtest.Must(t, err)
	h.Sum(sum[:0])
	return sum
}

// command returns a command that runs the program, with its own folder for temporary files.
func command(t *testing.T, ctx context.Context, args ...string) (cmd *exec.Cmd, temporary string) {
	temporary, err := os.MkdirTemp("", "rescue-") // shorter than t.TempDir(), because sockets are made in it
	vmtest.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(temporary) })
	cmd = exec.CommandContext(ctx, build.Directvol, append([]string{"rescue"}, args...)...)
	cmd.Env = append(os.Environ(), "TMPDIR="+temporary)
	return cmd, temporary
}

// run rescues a disk as a user does.
func run(t *testing.T, ctx context.Context, args ...string) (report rescue.Report, said string, exit int) {
	t.Helper()
	cmd, temporary := command(t, ctx, append([]string{"--json"}, args...)...)
	var out, steps bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &steps
	err := cmd.Run()
	if _, failed := errors.AsType[*exec.ExitError](err); err != nil && !failed {
		t.Fatal(err)
	}
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		t.Fatalf("--json: %v\n%s%s", err, out.Bytes(), steps.Bytes())
	}
	leavesNothing(t, temporary)
	return report, steps.String(), cmd.ProcessState.ExitCode()
}

// interrupted presses Ctrl-C when a step begins.
func interrupted(t *testing.T, c cut, step, words string) {
	t.Helper()
	cmd, temporary := command(t, vmtest.Within(t, vmtest.JobLimit), c.Path)
	steps, err := cmd.StderrPipe()
	vmtest.Must(t, err)
	vmtest.Must(t, cmd.Start())
	said, pressed := "", false
	for lines := bufio.NewScanner(steps); lines.Scan(); {
		said += lines.Text() + "\n"
		if !pressed && strings.HasPrefix(lines.Text(), step) {
			pressed = true
			vmtest.Must(t, cmd.Process.Signal(unix.SIGINT))
		}
	}
	cmd.Wait() // the error is the exit status
	if exit := cmd.ProcessState.ExitCode(); !pressed || exit != 130 || !strings.Contains(said, "directvol: interrupted ") || !strings.Contains(said, words) {
		t.Errorf("Ctrl-C at the step %q\nwant exit 130, and an error that says so\ngot  exit %d\n%s", step, exit, said)
	}
	leavesNothing(t, temporary)
	if d, err := holders.Open(c.Path); err != nil {
		t.Error(err)
	} else {
		found, err := d.Settled(t.Context(), nil)
		d.Close()
		if err == nil {
			err = found.Err(c.Path)
		}
		if err != nil {
			t.Errorf("after Ctrl-C: %v", err)
		}
	}
	t.Log(said)
}

// leavesNothing fails if the program has left a temporary file.
func leavesNothing(t *testing.T, temporary string) {
	t.Helper()
	left, err := os.ReadDir(temporary)
	if err != nil || len(left) != 0 {
		t.Errorf("rescue leaves in its folder for temporary files\nwant nothing\ngot  %v, error %v", left, err)
	}
}
