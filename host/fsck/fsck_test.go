package fsck

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// image makes a small ext4, or a small xfs of the least size that mkfs.xfs takes.
func image(t *testing.T, fstype string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(304 << 20); err != nil {
		t.Fatal(err)
	}
	mkfs, err := find("mkfs." + fstype)
	if err != nil {
		t.Skipf("%v: apt-get install e2fsprogs xfsprogs, and run go test ./host/fsck", err)
	}
	if out, err := exec.Command(mkfs, "-q", path).CombinedOutput(); err != nil {
		t.Fatalf("mkfs: %v\n%s", err, out)
	}
	return path
}

func TestOpenDiskIsCheckedWhateverItsNameLeadsTo(t *testing.T) {
	for fstype := range checkers {
		path := image(t, fstype)
		disk, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer disk.Close()
		if err := os.Rename(path, path+".old"); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("not the disk"), 0o600); err != nil {
			t.Fatal(err)
		}
		run, err := CheckFile(t.Context(), fstype, path, disk)
		if err != nil {
			t.Fatal(err)
		}
		if err := run.Err(fstype); err != nil {
			t.Error(err)
		}
		if want := strings.Join(append(checkers[fstype].argv, path), " "); run.Command != want || strings.Contains(run.Output, inherited) {
			t.Errorf("want %s, by that name\ngot  %s\n%s", want, run.Command, run.Output)
		}
	}
}

func TestMissingProgramIsNamedWithItsPackage(t *testing.T) {
	if err := Available("btrfs"); err == nil || !strings.Contains(err.Error(), "btrfs") {
		t.Errorf("want btrfs refused\ngot  %v", err)
	}
	for fstype, c := range checkers {
		checkers[fstype] = checker{[]string{"no-such-program"}, c.wrong, c.deb}
		err := Available(fstype)
		checkers[fstype] = c
		if err == nil || !strings.Contains(err.Error(), "apt-get install --no-install-recommends "+c.deb) {
			t.Errorf("want the package %s named\ngot  %v", c.deb, err)
		}
	}
}

func TestOutputIsBoundedAndNoLongOneIsSilent(t *testing.T) {
	var out output
	line := strings.Repeat("x", 1<<10) + "\n"
	for range 2 * maxOutput / len(line) {
		if n, err := out.Write([]byte(line)); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
	}
	run := Run{Output: out.String()}
	if len(run.Output) > maxOutput+len(cut)+2 {
		t.Errorf("output of %d bytes", len(run.Output))
	}
	if err := run.Err("xfs"); err == nil || !strings.Contains(err.Error(), cut) {
		t.Errorf("want a check whose output was cut not to pass\ngot  %v", err)
	}
}
