package rescue

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/qemu"
)

func TestAttemptThatHasMovedTheSuperblockOnIsRepeated(t *testing.T) {
	path := made(t, "mkfs.xfs", "-q", "-b", "size=4096", "-d", "agcount=4")
	must(t, os.Truncate(path, grownMiB*mib))
	r, begins := asked(t, path, func(n int) error {
		if n == 1 {
			editGroup(t, path, 0, resized(grownBlocks, grownGroups))
			return errRefused
		}
		return nil
	})
	if err := r.mount(t.Context()); err != nil || !slices.Equal(*begins, []uint64{304 * mib, grownMiB * mib}) || r.report.Superblock != nil {
		t.Errorf("\nwant a second attempt, and nothing written\ngot  %d, %v, %+v", *begins, err, r.report.Superblock)
	}
}

// Each group that was once the last one yields a size with which recovery may begin. They are tried
// from the smallest, because the size at which the log begins is unknown.
func TestSizesInBetweenAreTriedInOrder(t *testing.T) {
	path := grownImage(t)
	shorten(t, path, 3)
	shorten(t, path, 5)
	r, begins := asked(t, path, func(int) error { return errRefused })
	editGroup(t, path, 0, resized(3*wholeGroup+wholeGroup/2, 4))
	before := hash(t, path)
	err := r.mount(t.Context())
	want := []uint64{groupMiB * mib * 7 / 2, 4 * groupMiB * mib, 6 * groupMiB * mib, grownMiB * mib}
	if !isRefusal(err) || !slices.Equal(*begins, want) {
		t.Errorf("attempts begin with\nwant %d\ngot  %d, %v", want, *begins, err)
	}
	if hash(t, path) != before || r.report.Superblock == nil || !r.report.Superblock.PutBack || !strings.Contains(err.Error(), "the old one was put back") {
		t.Errorf("\nwant the disk unchanged, and an error that says so\ngot  %v, %+v", err, r.report.Superblock)
	}
}

func TestLargerSizesAreNotTriedWhereTheEndIsNotTheReason(t *testing.T) {
	path := grownImage(t)
	shorten(t, path, 5)
	before := hash(t, path)
	r, begins := asked(t, path, func(int) error { return errRefused })
	attempt := r.attempt
	r.attempt = func(ctx context.Context) error {
		err := attempt(ctx)
		if len(*begins) == 2 {
			r.said = []string{"XFS (vda): Metadata CRC error detected"}
		}
		return err
	}
	if err := r.mount(t.Context()); !isRefusal(err) || len(*begins) != 2 || hash(t, path) != before || !r.report.Superblock.PutBack {
		t.Errorf("\nwant two attempts, and the disk as it was\ngot  %d, %v, %+v", *begins, err, r.report.Superblock)
	}
}

func TestSuperblockWrittenByTheRecoveryIsKept(t *testing.T) {
	path := grownImage(t)
	r, _ := asked(t, path, func(n int) error {
		if n == 2 {
			editGroup(t, path, 0, func(s []byte) { s[150]++ }) // sb_fdblocks
		}
		return errRefused
	})
	err := r.mount(t.Context())
	if !isRefusal(err) || primaryBytes(t, path) != grownMiB*mib || r.report.Superblock == nil || r.report.Superblock.PutBack || !strings.Contains(err.Error(), "left so") {
		t.Errorf("\nwant the superblock left, and an error that says so\ngot  %d bytes, %v, %+v", primaryBytes(t, path), err, r.report.Superblock)
	}
}

// Ctrl-C arrives while the VM begins with the new size, or between two steps. Another rescue must
// be able to continue.
func TestInterruptedCorrectionCanBeRescuedAgain(t *testing.T) {
	for _, at := range []string{"read its superblock again", "look for", "set a larger size", "the second attempt", "put its"} {
		path := grownImage(t)
		ctx, interrupt := context.WithCancel(t.Context())
		r, _ := asked(t, path, func(n int) error {
			if n == 2 && at == "the second attempt" {
				interrupt()
				return context.Canceled
			}
			return errRefused
		})
		r.Progress = func(s Step) {
			if strings.HasPrefix(s.Name, at) {
				interrupt()
			}
		}
		err := r.mount(ctx)
		if err == nil || ctx.Err() == nil {
			t.Errorf("at %q\nwant it interrupted\ngot  %v", at, err)
		}
		interrupt()
		written := r.report.Superblock != nil
		if size := primaryBytes(t, path); size != 304*mib || written && !strings.Contains(err.Error(), "from 318767104 to 524288000 bytes, and the old one was put back") {
			t.Errorf("at %q\nwant the old size, and an error that says so\ngot  %d bytes, %v", at, size, err)
		}
		r.close()
		again, begins := asked(t, path, func(n int) error {
			if primaryBytes(t, path) == grownMiB*mib {
				return nil
			}
			return errRefused
		})
		if err := again.mount(t.Context()); err != nil {
			t.Errorf("after Ctrl-C at %q\nwant it rescued\ngot  %v, attempts with %d", at, err, *begins)
		}
	}
}

// After any failure of the second mount, the disk must be as it was.
func TestSuperblockIsPutBackAfterAnyFailure(t *testing.T) {
	for _, failure := range []error{errors.New("QEMU does not start"), qemu.ErrEnded, agentclient.ErrOutcomeUnknown, mountError{unix.EINVAL, false}, errRefused} {
		path := grownImage(t)
		before := hash(t, path)
		r, begins := asked(t, path, func(n int) error { return []error{errRefused, failure}[n-1] })
		err := r.mount(t.Context())
		if !errors.Is(err, failure) || len(*begins) != 2 || hash(t, path) != before || !r.report.Superblock.PutBack {
			t.Errorf("%v\nwant the disk as it was\ngot  %d bytes, %v, %+v", failure, primaryBytes(t, path), err, r.report.Superblock)
		}
		if want := "its superblock was changed from 318767104 to 524288000 bytes, and the old one was put back"; strings.Count(err.Error(), want) != 1 {
			t.Errorf("\nwant once %q\ngot  %v", want, err)
		}
	}
}

func TestSuperblockThatCannotBePutBackIsNamed(t *testing.T) {
	path := grownImage(t)
	r, _ := asked(t, path, func(n int) error {
		if n == 2 {
			other, err := os.OpenFile(path, os.O_RDWR, 0)
			must(t, err)
			t.Cleanup(func() { other.Close() })
		}
		return errRefused
	})
	err := r.mount(t.Context())
	if !isRefusal(err) || primaryBytes(t, path) != grownMiB*mib || r.report.Superblock.PutBack {
		t.Errorf("\nwant a disk that somebody has left alone\ngot  %d bytes, %v", primaryBytes(t, path), err)
	}
	for _, want := range []string{"from 318767104 to 524288000 bytes, and was left so: it could not be put back", "is in use"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("\nwant %q\ngot  %v", want, err)
		}
	}
}

func TestSizeThatRecoveryDoesNotReachIsAnError(t *testing.T) {
	path := grownImage(t)
	shorten(t, path, 5)
	r, _ := asked(t, path, func(n int) error { return []error{errRefused, nil}[n-1] })
	err := r.mount(t.Context())
	if err == nil || isRefusal(err) || !strings.Contains(err.Error(), "and the superblock of group 1 had 524288000") || !strings.Contains(err.Error(), "its superblock was changed from") {
		t.Errorf("\nwant an error that names both sizes\ngot  %v", err)
	}
}

func TestDiskThatWasTakenBetweenVMsIsNotWritten(t *testing.T) {
	path := grownImage(t)
	before := hash(t, path)
	r, _ := asked(t, path, func(int) error { return errRefused })
	attempt := r.attempt
	r.attempt = func(ctx context.Context) error {
		other, err := os.OpenFile(path, os.O_RDWR, 0)
		must(t, err)
		t.Cleanup(func() { other.Close() })
		return attempt(ctx)
	}
	if err := r.mount(t.Context()); err == nil || !strings.Contains(err.Error(), "is in use") || hash(t, path) != before {
		t.Errorf("\nwant it left alone\ngot  %v", err)
	}
}
