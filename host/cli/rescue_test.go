package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/host/fsck"
	"github.com/directvol/directvol/host/rescue"
	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/program/programtest"
)

func TestWrongCommandLineEndsWithStatus2(t *testing.T) {
	for _, args := range [][]string{
		{"nonsense"}, {"rescue"}, {"rescue", "a", "b"}, {"rescue", "--nonsense", "a"}, {"rescue", "--timeout", "0s", "a"}, {"rescue", "--check-timeout", "-1s", "a"}, {"vhost-vsock", "--nonsense"},
		{"vhost-vsock", "--socket", "s", "--uds-path", "u", "--guest-cid", "2"}, {"vhost-vsock", "--socket", "s", "--uds-path", "s", "--guest-cid", "3"},
	} {
		if got := programtest.Run(t.Context(), New(), args...); got.Exit != program.WrongUsage || strings.Count(got.Stderr, "\n") != 1 {
			t.Errorf("%q\nwant an error of one line, exit 2\ngot  %+v", args, got)
		}
	}
}

func TestRescueFilesLieBesideTheProgramOrInShare(t *testing.T) {
	top := t.TempDir()
	binary := filepath.Join(top, "bin", "directvol")
	share := filepath.Join(top, "share", "directvol")
	for _, dir := range []string{filepath.Dir(binary), share} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(top, "link")
	write(t, binary)
	if err := os.Symlink(binary, link); err != nil {
		t.Fatal(err)
	}
	cfg := rescue.Config{Directvol: link}
	if err := findRescueFiles(&cfg); err == nil || !strings.Contains(err.Error(), "make rescue") || !strings.Contains(err.Error(), "--kernel") {
		t.Errorf("\nwant what is missing named with what makes it\ngot  %v", err)
	}
	write(t, filepath.Join(share, "rescue-vmlinuz"))
	if err := findRescueFiles(&cfg); err == nil || !strings.Contains(err.Error(), "rescue.cpio is neither") {
		t.Errorf("\nwant rescue.cpio missing\ngot  %v", err)
	}
	write(t, filepath.Join(share, "rescue.cpio"))
	write(t, filepath.Join(top, "bin", "rescue.cpio"))
	if err := findRescueFiles(&cfg); err != nil || cfg.Kernel != filepath.Join(share, "rescue-vmlinuz") || cfg.Image != filepath.Join(top, "bin", "rescue.cpio") {
		t.Errorf("\nwant each from where it is, beside the program first\ngot  %+v, error %v", cfg, err)
	}
	cfg = rescue.Config{Directvol: link, Kernel: "k", Image: "i"}
	if err := findRescueFiles(&cfg); err != nil || cfg.Kernel != "k" || cfg.Image != "i" {
		t.Errorf("\nwant what was named\ngot  %+v, error %v", cfg, err)
	}
}

func write(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestOutcomeSaysThatTheSuperblockWasWritten(t *testing.T) {
	r := rescue.Report{Disk: "d", Fsck: &fsck.Run{}, Superblock: &rescue.Correction{FromBytes: 304, WroteBytes: 456, ToBytes: 900}}
	if got, want := outcome(r), "it had grown from 304 bytes to 900 bytes, and its superblock had to be corrected; it mounts"; !strings.Contains(got, want) {
		t.Errorf("\nwant %q\ngot  %s", want, got)
	}
}

func TestOutcomeSaysThatE2fsckHasReplayedTheJournal(t *testing.T) {
	r := rescue.Report{Disk: "d", Recovered: rescue.RecoveredYes, Fsck: &fsck.Run{}, Replay: &fsck.Run{Exit: 1}}
	got, want := outcome(r), "until e2fsck -p had replayed its journal (exit 1; --json has its output), and it mounts again"
	if !strings.Contains(got, want) || strings.Contains(got, "recovered without loss") {
		t.Errorf("\nwant %q, and no promise of what e2fsck does\ngot  %s", want, got)
	}
}

// With --json the output is one object, also after a failure, and the error comes in addition.
func TestFailedRescueIsOneJSONObject(t *testing.T) {
	disk := filepath.Join(t.TempDir(), "disk.img")
	write(t, disk)
	for want, args := range map[string][]string{
		"make rescue":     {"rescue", "--json", disk},
		"it is empty":     {"rescue", "--json", "--kernel", disk, "--image", disk, disk},
		"no-such-disk.im": {"rescue", "--json", "--kernel", disk, "--image", disk, "no-such-disk.img"},
	} {
		got := programtest.Run(t.Context(), New(), args...)
		var report rescue.Report
		if err := json.Unmarshal([]byte(got.Stdout), &report); err != nil || got.Exit != program.Failed ||
			!strings.HasSuffix(got.Stderr, "directvol: "+report.Error+"\n") || !strings.Contains(report.Error, want) || report.Disk != args[len(args)-1] {
			t.Errorf("%q\nwant an object with the error %q\ngot  %+v, %v", args, want, got, err)
		}
	}
}

func TestOutcomeSaysWhetherThereWasSomethingToRecover(t *testing.T) {
	for recovered, want := range map[string]string{
		rescue.RecoveredYes: "its log was recovered", rescue.RecoveredNo: "nothing to recover", rescue.RecoveredUnknown: "d (xfs): it mounts (Linux 7)",
	} {
		got := outcome(rescue.Report{Disk: "d", FSType: "xfs", Kernel: "7", Recovered: recovered, Fsck: &fsck.Run{Command: "xfs_repair -n d"}})
		if !strings.Contains(got, want) || !strings.HasSuffix(got, "xfs_repair -n d finds no errors") {
			t.Errorf("%s\nwant %q\ngot  %s", recovered, want, got)
		}
	}
}

func TestVMOfARescueHasTenMinutesUnlessItIsTold(t *testing.T) {
	if flag := newRescueCommand().Flags().Lookup("timeout"); flag == nil || flag.DefValue != rescueLimit.String() {
		t.Errorf("--timeout\nwant %v by default\ngot  %+v", rescueLimit, flag)
	}
}
