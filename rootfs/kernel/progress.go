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
	// watchInterval is the interval at which watch checks a directory.
	watchInterval = time.Second
	// fullLooks is how many checks in a row must find the disk full, because apt may fill it
	// briefly with a file that it removes again.
	fullLooks = 3
	// fullBytes is the limit of free space below which a disk counts as full. It is not 0, because
	// a filesystem may keep some space for itself.
	fullBytes = 1 << 20
)

// watch runs work as a step, and shows the size of dir meanwhile. If dir's disk is full, watch ends
// work's context and returns an error that says so, because apt-get would wait forever.
func watch(ctx context.Context, progress *output.Progress, name, dir string, work func(ctx context.Context) error) error {
	limited, end := context.WithCancelCause(ctx)
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
	err := work(limited)
	bytes := folderBytes(dir)
	close(quit)
	<-done
	outcome := bytes.String()
	if err != nil {
		outcome = "failed"
		if ctx.Err() != nil {
			outcome = "interrupted"
		}
		if full, ok := errors.AsType[fullDisk](context.Cause(limited)); ok {
			err = full
		}
	}
	step.End(outcome)
	return err
}

// fullDisk is the error for a directory whose disk is full.
type fullDisk string

func (dir fullDisk) Error() string {
	return fmt.Sprintf("the disk of %s is full: make room, some 300 MB in all, or name a folder on another disk (--cache)", string(dir))
}

// isFull reports whether the disk of dir has no room for another small file.
func isFull(dir string) bool {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return false
	}
	free := st.Bavail
	if os.Geteuid() == 0 { // root may also use the filesystem's reserve
		free = st.Bfree
	}
	return free*uint64(st.Bsize) < fullBytes || st.Files > 0 && st.Ffree == 0
}

// folderBytes returns the size of all files below dir. It ignores files that vanish meanwhile.
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
