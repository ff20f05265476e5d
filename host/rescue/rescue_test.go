package rescue

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/holders"
)

// config returns the configuration of a rescue whose VM cannot start, because Directvol is not a
// program.
func config(t *testing.T, disk string) Config {
	t.Helper()
	dir := t.TempDir()
	cfg := Config{Disk: disk, Kernel: filepath.Join(dir, "vmlinuz"), Image: filepath.Join(dir, "rescue.cpio"), Timeout: time.Minute}
	must(t, os.WriteFile(cfg.Kernel, bzImage("7.2.12-test"), 0o600))
	must(t, os.WriteFile(cfg.Image, nil, 0o600))
	t.Setenv("TMPDIR", dir)
	return cfg
}

// leavesNothing fails the test if a rescue has left a directory of its VM.
func leavesNothing(t *testing.T, cfg Config) {
	t.Helper()
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(cfg.Kernel), "directvol-rescue-*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestDiskInUseIsLeftAloneWhoeverAsks(t *testing.T) {
	path := made(t, "mkfs.ext4", "-q", "-F")
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(path, link))
	open, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer open.Close()
	before, err := os.ReadFile(path)
	must(t, err)
	var steps []string
	cfg := config(t, link)
	cfg.Progress = func(s Step) { steps = append(steps, s.Name) }
	report, err := Run(t.Context(), cfg)
	inUse, ok := errors.AsType[*holders.InUseError](err)
	if !ok || len(inUse.Holders) != 1 || inUse.Holders[0].PID != os.Getpid() || !slices.Equal(report.Holders, inUse.Holders) || report.Error != err.Error() {
		t.Errorf("\nwant it refused, and this process named\ngot  %v, report %+v", err, report)
	}
	if last := steps[len(steps)-1]; last != "make sure that nothing uses it" {
		t.Errorf("it went on to %q", last)
	}
	after, err := os.ReadFile(path)
	must(t, err)
	if !slices.Equal(before, after) {
		t.Error("the disk was changed")
	}
}

func TestMissingFilesAreNamedBeforeAnythingRuns(t *testing.T) {
	disk := made(t, "mkfs.xfs", "-q")
	for want, change := range map[string]func(*Config){
		"no-such-disk":        func(c *Config) { c.Disk = "/no-such-disk" },
		"is a directory":      func(c *Config) { c.Disk = t.TempDir() },
		"holds nothing":       func(c *Config) { c.Disk = "testdata/zeros" },
		"no-such-kernel":      func(c *Config) { c.Kernel = "/no-such-kernel" },
		"is not a kernel":     func(c *Config) { c.Kernel = c.Image },
		"no-such-image":       func(c *Config) { c.Image = "/no-such-image" },
		"set Directvol":       func(*Config) {},
		"it took longer than": func(c *Config) { c.Timeout = time.Nanosecond },
	} {
		cfg := config(t, disk)
		change(&cfg)
		if cfg.Disk == "testdata/zeros" {
			cfg.Disk = filepath.Join(t.TempDir(), "zeros")
			must(t, os.WriteFile(cfg.Disk, make([]byte, 4096), 0o600))
		}
		if _, err := os.Stat("/dev/vhost-vsock"); err == nil && want == "set Directvol" {
			continue // not needed on this host
		}
		report, err := Run(t.Context(), cfg)
		if err == nil || !strings.Contains(err.Error(), want) || report.Error != err.Error() || report.Mounted {
			t.Errorf("\nwant %q\ngot  %v, report %+v", want, err, report)
		}
		leavesNothing(t, cfg)
	}
}

func TestInterruptedRescueNamesTheStateOfTheDisk(t *testing.T) {
	disk := made(t, "mkfs.xfs", "-q")
	for step, want := range map[string]string{
		"identify":     "interrupted before the disk was touched",
		"make sure":    "interrupted before the disk was touched",
		"boot a VM":    "interrupted before the disk was touched",
		"no such step": "",
	} {
		ctx, interrupt := context.WithCancel(t.Context())
		cfg := config(t, disk)
		cfg.Progress = func(s Step) {
			if strings.HasPrefix(s.Name, step) {
				interrupt()
			}
		}
		_, err := Run(ctx, cfg)
		interrupt()
		if err == nil || want != "" && (!strings.HasPrefix(err.Error(), want) || !errors.Is(err, context.Canceled)) {
			t.Errorf("at %q\nwant %q\ngot  %v", step, want, err)
		}
		leavesNothing(t, cfg)
		d, err := holders.Open(disk)
		must(t, err)
		must(t, d.Claim()) // nothing has the disk any more
		must(t, d.Close())
	}
}

// afterVM returns a rescue that has reached its check.
func afterVM(t *testing.T, fstype, path string) *rescue {
	t.Helper()
	r := &rescue{Config: Config{Disk: path}, found: found{fstype: fstype}, report: NewReport(path)}
	var err error
	r.disk, err = holders.Open(path)
	must(t, err)
	t.Cleanup(r.close)
	must(t, r.disk.Claim())
	must(t, r.disk.Unlock())
	return r
}

func TestFailedCheckNamesTheNextStep(t *testing.T) {
	for _, c := range []struct{ fstype, program, script, want string }{
		{"ext4", "debugfs", "", ""},
		{"ext4", "debugfs", "ssv free_blocks_count 7", "run e2fsck -p"},
		{"ext4", "debugfs", "ssv state 3", "its superblock records an error"},
		{"xfs", "xfs_db", "", ""},
		{"xfs", "xfs_db", "write fdblocks 7", "copy the disk first"},
	} {
		args := []string{"-q"}
		if c.fstype == "ext4" {
			args = append(args, "-F")
		}
		path := made(t, "mkfs."+c.fstype, args...)
		change := []string{"-w", "-R", c.script, path}
		if c.fstype == "xfs" {
			change = []string{"-x", "-c", "sb 0", "-c", c.script, path}
		}
		if c.script != "" {
			if out, err := exec.Command("/usr/sbin/"+c.program, change...).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", c.program, err, out)
			}
		}
		r := afterVM(t, c.fstype, path)
		err := r.check(t.Context())
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s, %q\nwant %q\ngot  %v", c.fstype, c.script, c.want, err)
		}
		if r.report.Fsck == nil || r.report.Fsck.Output == "" {
			t.Errorf("%s, %q: no check is reported: %+v", c.fstype, c.script, r.report)
		}
	}
}

func TestDiskThatWasTakenAfterTheVMIsNotChecked(t *testing.T) {
	path := made(t, "mkfs.xfs", "-q")
	r := afterVM(t, "xfs", path)
	other, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer other.Close()
	if err := r.check(t.Context()); err == nil || !strings.Contains(err.Error(), "but not checked") || r.report.Fsck != nil {
		t.Errorf("\nwant no check of a disk in use\ngot  %v, %+v", err, r.report.Fsck)
	}
}

func TestDiskThatWasReplacedMeanwhileIsNoSuccess(t *testing.T) {
	path := made(t, "mkfs.xfs", "-q")
	r := afterVM(t, "xfs", path)
	must(t, os.Rename(path, path+".old"))
	must(t, os.WriteFile(path, nil, 0o600))
	err := r.check(t.Context())
	if err == nil || !strings.Contains(err.Error(), path+" is no longer that disk") || !strings.Contains(err.Error(), "opened is "+path+".old") {
		t.Errorf("\nwant an error with the disk's present path\ngot  %v", err)
	}
}

func TestFullFileSystemOfTheHostIsNamed(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("full", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("mount: %v: run go test ./host/rescue as root", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	path := filepath.Join(dir, "disk.img")
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, os.Truncate(path, 16<<20))
	r, failure := afterVM(t, "xfs", path), errors.New("it took longer")
	if err := r.orFull(failure); err != failure {
		t.Errorf("with room\nwant %v\ngot  %v", failure, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "rest"), make([]byte, 9<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("want it full, got %v", err)
	}
	if err := r.orFull(failure); !errors.Is(err, failure) || !strings.Contains(err.Error(), "is full") {
		t.Errorf("\nwant an error that says the filesystem is full\ngot  %v", err)
	}
	if err := r.orFull(nil); err != nil {
		t.Error(err)
	}
}

func TestCheckHasALimitThatItsErrorNames(t *testing.T) {
	r := afterVM(t, "xfs", made(t, "mkfs.xfs", "-q"))
	r.CheckTimeout = time.Nanosecond
	err := r.check(t.Context())
	for _, want := range []string{"was mounted and unmounted, but not checked", "xfs_repair -n", "longer than 1ns (--check-timeout)"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("\nwant %q\ngot  %v", want, err)
		}
	}
	for bytes, want := range map[uint64]time.Duration{0: 10 * time.Minute, 100 << 30: 110 * time.Minute, 1 << 62: mostCheck + leastCheck} {
		if got := checkLimit(bytes); got != want {
			t.Errorf("limit for %d bytes\nwant %v\ngot  %v", bytes, want, got)
		}
	}
}

func TestRefusalOfBothKernelsNamesThePriceOfTheLastResort(t *testing.T) {
	refused := mountError{errors.New("structure needs cleaning"), true}
	for fstype, words := range map[string][]string{
		"xfs":  {"mount refused by this kernel too (Linux 7)", "XFS (vda): bad", "copy the whole disk first", "-L", "files that fsync had acknowledged"},
		"ext4": {"mount refused by this kernel too (Linux 7)", "XFS (vda): bad", "copy the whole disk first", "e2fsck -p"},
	} {
		r := &rescue{found: found{fstype: fstype}, report: Report{Kernel: "7", KernelLog: []string{"XFS (vda): bad"}}}
		err := r.wayOut(refused)
		for _, want := range words {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s\nwant %q\ngot  %v", fstype, want, err)
			}
		}
		if other := errors.New("other"); r.wayOut(other) != other || r.wayOut(nil) != nil {
			t.Error("an error that is not a refused mount starts another attempt")
		}
	}
}

func TestRecoveryIsReportedIfKnown(t *testing.T) {
	for _, c := range []struct {
		found   found
		line    string
		mounted bool
		want    string
	}{
		{found{fstype: "xfs"}, "XFS (vda): Ending recovery (logdev: internal)", true, RecoveredYes},
		{found{fstype: "xfs"}, "XFS (vda): Ending clean mount", true, RecoveredNo},
		{found{fstype: "xfs"}, "XFS (vda): other words", true, RecoveredUnknown},
		{found{fstype: "xfs"}, "XFS (vda): Ending recovery (logdev: internal)", false, RecoveredUnknown},
		{found{fstype: "ext4"}, "", true, RecoveredNo},
		{found{fstype: "ext4", replays: true}, "", true, RecoveredYes},
	} {
		r := &rescue{found: c.found, report: NewReport("")}
		r.report.KernelLog = append(r.report.KernelLog, c.line)
		if r.recovered(c.mounted); r.report.Recovered != c.want {
			t.Errorf("%+v\nwant %s\ngot  %s", c, c.want, r.report.Recovered)
		}
	}
}

func TestChildrenOfThisProcessAreOurs(t *testing.T) {
	if got := parentIn("Name:\tx\nPid:\t7\nPPid:\t42\n"); got != 42 {
		t.Errorf("parent\nwant 42\ngot  %d", got)
	}
	if !isOurs(os.Getpid()) {
		t.Error("this process, which holds the store of its VM open, is not ours")
	}
	if isOurs(os.Getppid()) || isOurs(1<<30) || parentIn("") != 0 {
		t.Error("a process that is not a child is ours")
	}
	if cid := freeCID(); cid < 3 {
		t.Errorf("guest CID %d", cid)
	}
}
