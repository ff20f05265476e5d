package volume

import (
	"cmp"
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/turns"
)

// lookLimit bounds the wait for a filesystem to answer whether a path that is no mount point
// exists.
const lookLimit = time.Second

// look returns the mark of the mount at path. At a mount point, mount.Look does not block, except
// on the server of a filesystem that the path leads through, which may have been mounted there
// since the volume was found. For any other path, the filesystem may have to read a disk. If a
// filesystem hangs, one thread per mount waits for it, whatever paths are asked for. A lookup of a
// known volume never waits for lookups of paths inside it.
func (t *Table) look(path string, known *Volume) (mount.Mark, error) {
	if known != nil && known.behind == "" {
		return walk(&t.looks, path, path, true)
	}
	mounts, err := mount.Now()
	if err != nil {
		return mount.Mark{}, err
	}
	mounted, through := mounts.IsPoint(path), mounts.Behind(path)
	if mounted && through == "" {
		return mount.Look(path)
	}
	if !mounted {
		if through, err = mount.Enclosing(path); err != nil {
			return mount.Mark{}, err
		}
	}
	return walk(&t.walks, path, through, mounted)
}

// walk runs mount.Look in the turn of through, the mount point of a filesystem that may not answer.
// It does not follow symbolic links in a path that is no mount point, because a link could lead
// into any other filesystem.
func walk(among *turns.Turns, path, through string, mounted bool) (mount.Mark, error) {
	ctx, cancel := deadline.Awake(context.Background(), lookLimit)
	defer cancel()
	done, err := among.Take(ctx, through)
	if err != nil {
		return mount.Mark{}, refuseLate(path, through)
	}
	answers := make(chan looked, 1)
	go func() {
		defer done()
		if !mounted {
			if link := linkIn(path); link != "" {
				answers <- looked{err: errkind.New(errkind.InvalidArgument, "volume %.200q: %.200q is a symbolic link: name the path that the volume is mounted at", path, link)}
				return
			}
		}
		mark, err := mount.Look(path)
		answers <- looked{mark, err}
	}()
	if a, ok := await(ctx, answers); ok {
		return a.mark, a.err
	}
	return mount.Mark{}, refuseLate(path, through)
}

// looked is the answer of mount.Look.
type looked struct {
	mark mount.Mark
	err  error
}

// await waits for an answer until ctx ends. An answer that has come counts, however late this
// goroutine runs: a busy guest may stop all of the agent for longer than lookLimit.
func await(ctx context.Context, answers <-chan looked) (looked, bool) {
	select {
	case a := <-answers:
		return a, true
	case <-ctx.Done():
	}
	select {
	case a := <-answers:
		return a, true
	default:
		return looked{}, false
	}
}

// refuseLate returns the error for a caller that has waited for the filesystem at through. If
// through is the volume's own path, another filesystem has been mounted over a parent directory
// since the volume was found, and the error names that filesystem.
func refuseLate(path, through string) error {
	if mounts, err := mount.Now(); err == nil && through == path {
		through = cmp.Or(mounts.Behind(path), path)
	}
	return errkind.New(errkind.DeadlineExceeded, "volume %.200q: the path leads through the filesystem at %s, which does not answer", path, through)
}

// linkIn returns the first prefix of a clean path that is a symbolic link, or "". It does not look
// behind a link. It waits for the filesystems that the path leads through.
func linkIn(path string) string {
	for end := 1; end <= len(path); end++ {
		if end < len(path) && path[end] != '/' {
			continue
		}
		_, err := os.Readlink(path[:end])
		if err == nil {
			return path[:end]
		}
		if !errors.Is(err, unix.EINVAL) { // it is no link, and the path may continue
			return ""
		}
	}
	return ""
}
