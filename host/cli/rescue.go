package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/directvol/directvol/host/rescue"
	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/protocols/program"
)

// rescueLimit is long enough for a large log on an emulated processor.
const rescueLimit = 10 * time.Minute

func newRescueCommand() *cobra.Command {
	var cfg rescue.Config
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "rescue DISK",
		Short: "Make a volume mountable again after a power cut",
		Long: `rescue is for a volume that its sandbox refuses to mount since a power failure. It
boots a throw-away VM with a newer kernel, which mounts DISK once and so recovers
its log, unmounts it, and then checks it with xfs_repair -n or e2fsck -fn.

When: the mount of an xfs that was grown shortly before the power failure fails with
"structure needs cleaning" (EUCLEAN), and the guest's kernel logs one of these:
  - "xfs_buf_map_verify: daddr … out of range, EOFS …". Linux 6.1 gives up the
    recovery of the log. Newer kernels recover it, unless the xfs was grown more than
    once in the last minute;
  - "Metadata corruption detected at …", for example at __xfs_dir3_data_check: a
    directory that points into the new space was written to the disk. No kernel
    mounts it.
If the newer kernel refuses it too, rescue writes the new size into its superblock and
mounts it again. If one of these mounts succeeds, nothing is lost.
After any other power failure rescue does no harm: it shows whether the volume mounts
and is intact.

DISK is an image file or a block device that holds xfs or ext4. rescue writes what
a mount writes. If the mount is refused with EUCLEAN, it also writes, before it tries
again:
  - to an xfs, in the cases above, one sector, the superblock: only if other
    superblocks of the disk prove that the growth is in the log. If the mount still
    fails, rescue restores the old superblock, unless the recovery has changed it
    since, and reports this;
  - to an ext4 whose journal is not replayed yet, the writes of e2fsck -p, which
    replays it and makes safe repairs. Its output is in the report (--json).
It never
  - touches a disk that is in use on this host: by a sandbox, a mount, a loop device,
    or any process that has it open. It names the user and changes nothing;
  - runs xfs_repair -L, which discards the log, and with it files that fsync had
    acknowledged, or any other repair that drops data.
Run it as root: only root can examine other users' processes. rescue cannot see how
other hosts use a shared disk.

Ctrl-C ends it at any moment and leaves no VM behind. For a volume that is mounted at
that moment it is another power failure: run rescue again.

Exit status: 0, the volume can be given to its sandbox as before; 1, the message
names the reason and the remaining options; 2, wrong command line; 130, interrupted
by Ctrl-C.`,
		Example: `  directvol rescue /var/lib/volumes/data.img
  directvol rescue --json /dev/vg0/data | jq .mounted`,
		Args: oneDisk,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cfg.Timeout <= 0 {
				return program.Usagef("--timeout %v: want more than 0", cfg.Timeout)
			}
			if cfg.CheckTimeout < 0 {
				return program.Usagef("--check-timeout %v: want 0 or more", cfg.CheckTimeout)
			}
			cfg.Disk = args[0]
			return runRescue(cmd, cfg, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Kernel, "kernel", "", "the VM's kernel (default: rescue-vmlinuz beside this program, or in ../share/directvol)")
	f.StringVar(&cfg.Image, "image", "", "the VM's image (default: rescue.cpio, in the same places)")
	f.DurationVar(&cfg.Timeout, "timeout", rescueLimit, "how long each VM may take, from its start to its power-off")
	f.DurationVar(&cfg.CheckTimeout, "check-timeout", 0, "how long each run of e2fsck or xfs_repair may take (default: 10m, and 1m for each GiB of DISK)")
	f.BoolVar(&asJSON, "json", false, "print one JSON object at the end, also after a failure")
	return cmd
}

func oneDisk(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%d disks: want one DISK, an image file or a block device", len(args))
	}
	return nil
}

// runRescue prints the steps to standard error and the outcome to standard output.
func runRescue(cmd *cobra.Command, cfg rescue.Config, asJSON bool) error {
	logrus.SetLevel(logrus.FatalLevel) // ttrpc logs each abandoned call; the steps are enough
	cfg.Progress = showSteps(output.NewProgress(cmd.ErrOrStderr()))
	report, err := rescue.NewReport(cfg.Disk), error(nil)
	if cfg.Directvol, err = os.Executable(); err == nil {
		err = findRescueFiles(&cfg)
	}
	if err == nil {
		report, err = rescue.Run(cmd.Context(), cfg)
	} else {
		report = report.Failed(err)
	}
	text := ""
	if err == nil {
		text = outcome(report) + "\n"
	}
	return errors.Join(err, output.Answer(cmd.OutOrStdout(), asJSON, report, text))
}

// showSteps returns a function that shows a rescue's steps, which come one after the other.
func showSteps(progress *output.Progress) func(rescue.Step) {
	var running *output.Step
	return func(s rescue.Step) {
		if !s.Done {
			running = progress.Begin(s.Name)
			return
		}
		state := "ok"
		if s.Err != nil {
			state = "failed"
		}
		if s.Detail != "" {
			state += ", " + s.Detail
		}
		running.End(state)
	}
}

// outcome describes a successful rescue on one line.
func outcome(r rescue.Report) string {
	mounts := map[string]string{
		rescue.RecoveredYes: "its log was recovered without loss, and it mounts again",
		rescue.RecoveredNo:  "it mounts, and there was nothing to recover",
	}[r.Recovered]
	if mounts == "" {
		mounts = "it mounts"
	}
	if c := r.Superblock; c != nil {
		mounts = fmt.Sprintf("it had grown from %v to %v, and its superblock had to be corrected; ", output.Size(c.FromBytes), output.Size(c.ToBytes)) + mounts
	}
	if r.Replay != nil {
		mounts = fmt.Sprintf("the kernel refused it until e2fsck -p had replayed its journal (exit %d; --json has its output), and it mounts again", r.Replay.Exit)
	}
	return fmt.Sprintf("%s (%s): %s (Linux %s); %s finds no errors", r.Disk, r.FSType, mounts, r.Kernel, r.Fsck.Command)
}

// findRescueFiles sets the files that no flag names. They lie beside the program, or in the
// directory that a package uses.
func findRescueFiles(cfg *rescue.Config) error {
	binary, err := filepath.EvalSymlinks(cfg.Directvol)
	if err != nil {
		return err
	}
	beside := filepath.Dir(binary)
	for _, file := range []struct {
		path       *string
		name, flag string
	}{{&cfg.Kernel, "rescue-vmlinuz", "--kernel"}, {&cfg.Image, "rescue.cpio", "--image"}} {
		if *file.path != "" {
			continue
		}
		dirs := []string{beside, filepath.Join(beside, "../share/directvol")}
		for _, dir := range dirs {
			path := filepath.Join(dir, file.name)
			if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
				*file.path = path
				break
			}
		}
		if *file.path == "" {
			return fmt.Errorf("%s is neither in %s nor in %s: run make rescue in directvol's sources, or name a file with %s", file.name, dirs[0], dirs[1], file.flag)
		}
	}
	return nil
}
