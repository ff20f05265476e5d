package fsck

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"golang.org/x/sys/unix"
)

// checkVariable makes this test binary run a check instead of its tests.
const checkVariable = "DIRECTVOL_TEST_CHECK"

func TestMain(m *testing.M) {
	if disk := os.Getenv(checkVariable); disk != "" {
		_, err := Check(context.Background(), "ext4", disk)
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// standIn replaces e2fsck by a script.
func standIn(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "e2fsck"), []byte("#!/bin/sh\n"+script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// endless makes a FIFO and a stand-in for e2fsck that opens the FIFO, writes to it, and does not
// end.
func endless(t *testing.T) (fifo string) {
	t.Helper()
	fifo = filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	standIn(t, `exec 9>"`+fifo+`"; read -r _ _ _ _ group _ </proc/$$/stat; echo $$ $group $LC_ALL >&9; exec tail -f /dev/null`)
	return fifo
}

func TestProgramEndsWithItsParentAndIsInAGroupOfItsOwn(t *testing.T) {
	t.Setenv("LC_ALL", "de_DE.UTF-8")
	fifo := endless(t)
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), checkVariable+"=disk")
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	defer parent.Wait() // returns the status of a killed process
	defer parent.Process.Kill()
	said, err := os.Open(fifo)
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	lines := bufio.NewReader(said)
	line, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var pid, group int
	var locale string
	if _, err := fmt.Sscan(line, &pid, &group, &locale); err != nil || pid != group || locale != "C" {
		t.Errorf("\nwant a group of its own, and its words in English\ngot  %q, error %v", line, err)
	}
	parent.Process.Kill()
	if rest, err := io.ReadAll(lines); err != nil || len(rest) != 0 { // reads until no process has the FIFO open
		t.Errorf("after its parent's end\nwant nothing\ngot  %q, error %v", rest, err)
	}
}

func TestProgramThatTakesTooLongIsEndedAndTheLimitNamed(t *testing.T) {
	fifo := endless(t)
	limit := errors.New("it took longer than it may")
	ctx, end := context.WithCancelCause(t.Context())
	go func() {
		said, err := os.Open(fifo)
		if err == nil {
			bufio.NewReader(said).ReadString('\n')
			said.Close()
		}
		end(limit)
	}()
	if _, err := Check(ctx, "ext4", "disk"); !errors.Is(err, limit) || !strings.Contains(err.Error(), "e2fsck -fn disk") {
		t.Errorf("\nwant %v\ngot  %v", limit, err)
	}
}

func TestErrorsShowAStrangersBytesPrintableBoundedAndOnce(t *testing.T) {
	standIn(t, `i=0; while [ $i -lt 300 ]; do printf 'evil\033]0;x\007\377 %s\n' "$(printf '%0400d' 0)"; i=$((i+1)); done; exit 12`)
	run, err := Repair(t.Context(), "disk")
	for _, err := range []error{err, run.Err("ext4")} {
		if err == nil || strings.Count(err.Error(), "exits 12") != 1 || len(err.Error()) > shownBytes+200 {
			t.Fatalf("\nwant a bounded error\ngot  %v", err)
		}
		if at := strings.IndexFunc(err.Error(), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); at >= 0 {
			t.Errorf("not printable: %q", err.Error()[at:])
		}
	}
	if strings.Contains(run.Output, "\033") {
		t.Error("an escape in the Run's output")
	}
}

// When all is well, e2fsck shows the label or the disk's name, and btrfs the disk's name.
func TestLabelDoesNotDecide(t *testing.T) {
	for _, label := range []string{"WARNING", "sure ? no", "would "} {
		for fstype := range checkers {
			path := image(t, fstype, "-L", label)
			if err := os.Rename(path, path+" WARNING would "); err != nil {
				t.Fatal(err)
			}
			path += " WARNING would "
			run, err := Check(t.Context(), fstype, path)
			if err == nil {
				err = run.Err(fstype)
			}
			if err != nil {
				t.Errorf("%s, %q\nwant it whole\ngot  %v", fstype, label, err)
			}
		}
	}
	if err := (Run{Output: "[1/7] checking root items\nERROR: transid verify failed\n"}).Err("btrfs"); err == nil {
		t.Error("want an error of btrfs check found\ngot  nothing to mend")
	}
	for _, line := range []string{"Fix? no", "x: 11/16 files (0.0% non-contiguous), 7/9 blocks? no", "WARNING: bad format"} {
		if err := (Run{Output: "Pass 1\n" + line + "\n"}).Err("ext4"); err == nil {
			t.Errorf("%q\nwant it found\ngot  nothing to mend", line)
		}
	}
}

// e2fsck offers to make the extent tree of a fragmented file smaller, which is no fault
// (PR_1E_CAN_NARROW_EXTENT_TREE and PR_1E_CAN_COLLAPSE_EXTENT_TREE of its problem.c).
func TestOfferToMakeAnExtentTreeSmallerIsNoFault(t *testing.T) {
	const shorter, narrower = "Inode 12 extent tree (at level 2) could be shorter.  Optimize? no\n", "Inode 13 extent tree (at level 1) could be narrower.  Optimize? no\n"
	const whole = "Pass 1: Checking inodes, blocks, and sizes\n" + shorter + narrower + "\nPass 2: Checking directory structure\n"
	if err := (Run{Output: whole}).Err("ext4"); err != nil {
		t.Errorf("want it whole\ngot  %v", err)
	}
	if err := (Run{Output: whole + "Inode 13, i_blocks is 8, should be 16.  Fix? no\n"}).Err("ext4"); err == nil {
		t.Error("want the fault found beside the offer\ngot  nothing to mend")
	}
}

// image makes a small filesystem, of a size that mkfs.xfs accepts.
func image(t *testing.T, fstype string, options ...string) string {
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
		t.Skipf("%v: apt-get install e2fsprogs xfsprogs btrfs-progs, and run go test ./host/fsck", err)
	}
	if out, err := exec.Command(mkfs, append(options, "-q", path)...).CombinedOutput(); err != nil {
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
	if err := Available("f2fs"); err == nil || !strings.Contains(err.Error(), "f2fs") {
		t.Errorf("want f2fs refused\ngot  %v", err)
	}
	for fstype, c := range checkers {
		checkers[fstype] = checker{[]string{"no-such-program"}, c.wrong, c.harmless, c.deb}
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
