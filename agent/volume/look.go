package volume

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/turns"
)

// lookLimit is how long a filesystem is waited for that is to tell whether a path which
// is no mount point is there.
const lookLimit = time.Second

// look is mount.Look, which waits for nobody at a mount point, but for the server of a
// filesystem that the path leads through, and that may have been mounted there since the
// volume was found. Another path may have its filesystem read a disk. If one hangs, one
// thread a mount waits for it, whatever paths are asked for; a question for a known volume
// waits for none about paths inside it.
func (t *Table) look(path string, known *Volume) (mount.Mark, error) {
	if known != nil && known.behind == "" {
		return walk(&t.looks, path, path, true)
	}
	all, err := mount.All()
	if err != nil {
		return mount.Mark{}, err
	}
	mounted := slices.ContainsFunc(all, func(m *mount.Info) bool { return m.Mountpoint == path })
	through := mount.Behind(all, path)
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

// walk is look, in its turn, where the filesystem mounted at through may not answer. A path
// that is no mount point may hold symbolic links: it is not followed through one, which could
// lead into any other filesystem.
func walk(among *turns.Turns, path, through string, mounted bool) (mount.Mark, error) {
	ctx, cancel := context.WithTimeout(context.Background(), lookLimit)
	defer cancel()
	done, err := among.Take(ctx, through)
	if err != nil {
		return mount.Mark{}, refuseLate(path, through)
	}
	type answer struct {
		mark mount.Mark
		err  error
	}
	answers := make(chan answer, 1)
	go func() {
		defer done()
		if !mounted {
			if link := linkIn(path); link != "" {
				answers <- answer{err: errkind.New(errkind.InvalidArgument, "volume %.200q: %.200q is a symbolic link: name the path that the volume is mounted at", path, link)}
				return
			}
		}
		mark, err := mount.Look(path)
		answers <- answer{mark, err}
	}()
	select {
	case a := <-answers:
		return a.mark, a.err
	case <-ctx.Done():
		return mount.Mark{}, refuseLate(path, through)
	}
}

// refuseLate is the answer to who has waited for the filesystem at through. Where that is the
// volume's own path, another one has been mounted over a folder above since it was found.
func refuseLate(path, through string) error {
	if all, err := mount.All(); err == nil && through == path {
		through = cmp.Or(mount.Behind(all, path), path)
	}
	return errkind.New(errkind.DeadlineExceeded, "volume %.200q: the filesystem at %s, which the path leads through, does not answer whether it exists", path, through)
}

// linkIn returns the first part of a clean path that is a symbolic link, or "": what is
// behind a link is not looked at. It waits for the filesystems that the path leads through.
func linkIn(path string) string {
	for end := 1; end <= len(path); end++ {
		if end < len(path) && path[end] != '/' {
			continue
		}
		_, err := os.Readlink(path[:end])
		if err == nil {
			return path[:end]
		}
		if !errors.Is(err, unix.EINVAL) { // it is no link, and may have more in it
			return ""
		}
	}
	return ""
}
