package kernel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/output"
)

const (
	// watchInterval is how often a folder is looked at while something is written to it.
	watchInterval = time.Second
	// fullLooks is how many times in a row its disk must be full: a file that apt removes again may fill it for a moment.
	fullLooks = 3
	// fullBytes is less than a disk has free that is not full, by what its filesystem keeps for itself.
	fullBytes = 1 << 20
)

// watch runs work as a step, and shows how many bytes dir holds meanwhile. Where dir's disk is full it ends work's context, and returns
// an error that says so: apt-get would wait for ever.
func watch(ctx context.Context, progress *output.Progress, name, dir string, work func(ctx context.Context) error) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	step := progress.Begin(name)
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(watchInterval)
		defer ticker.Stop()
		for full := 0; ; {
			select {
			case <-ticker.C:
			case <-quit:
				return
			}
			step.Say(folderBytes(dir).String())
			if full++; !isFull(dir) {
				full = 0
			}
			if full == fullLooks {
				end(fullDisk(dir))
			}
		}
	}()
	err := work(ctx)
	bytes := folderBytes(dir)
	close(quit)
	<-done
	outcome := bytes.String()
	if err != nil {
		outcome = "failed"
		if full, ok := errors.AsType[fullDisk](context.Cause(ctx)); ok {
			err = full
		}
	}
	step.End(outcome)
	return err
}

// fullDisk is the error of a folder whose disk is full.
type fullDisk string

func (dir fullDisk) Error() string {
	return fmt.Sprintf("the disk of %s is full: make room, some 300 MB in all, or name a folder on another disk (--cache)", string(dir))
}

// isFull says of the disk below dir that it has no room for another file of some size, or for another file.
func isFull(dir string) bool {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return false
	}
	free := st.Bavail
	if os.Geteuid() == 0 { // whom the filesystem's reserve is for
		free = st.Bfree
	}
	return free*uint64(st.Bsize) < fullBytes || st.Files > 0 && st.Ffree == 0
}

// folderBytes adds up the files below dir; those that vanish meanwhile count for nothing.
func folderBytes(dir string) (total output.Size) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if info, err := d.Info(); err == nil && info.Mode().IsRegular() {
			total += output.Size(info.Size())
		}
		return nil
	})
	return total
}
