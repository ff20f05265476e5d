package volume

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/mount"
)

// Consistency is how good a copy of a volume's disk is that is made during a lease.
type Consistency int

const (
	// Frozen means that the filesystem is complete on its disk and not written to.
	Frozen Consistency = iota + 1
	// Synced means that the filesystem cannot be frozen, and that all earlier writes are on its
	// disk.
	Synced
	// CrashConsistent means that the filesystem's server decides what is on a disk.
	CrashConsistent
)

// FrozenVolume is a volume of a lease.
type FrozenVolume struct {
	Path        string
	Consistency Consistency
}

const (
	minLease = time.Millisecond
	maxLease = 10 * time.Minute
	// maxFrozen is how many volumes a lease may have.
	maxFrozen = 64
	// freezeLimit bounds how long the volumes of a lease may take to freeze, together. The first of
	// them are frozen meanwhile.
	freezeLimit = 10 * time.Second
)

// Freeze freezes the volumes at the paths, or none of them, and calls frozen with the lease's name.
// It returns when the lease has ended and the volumes are thawed: after length, when ctx ends, when
// frozen fails, by Thaw, and before one of them is unmounted. It returns nil if Thaw has ended the
// lease and the volumes were frozen all the time. If a disk does not answer, Freeze returns
// earlier, and its volume is thawed as soon as the disk answers.
func (t *Table) Freeze(ctx context.Context, paths []string, length time.Duration, frozen func(name string, volumes []FrozenVolume) error) error {
	named, beside, err := t.toFreeze(paths, length)
	if err != nil {
		return err
	}
	l, err := t.leases.take(ctx, named, beside)
	if err != nil {
		return err
	}
	return l.hold(ctx, length, frozen)
}

// Thaw ends the lease with a name. It returns nil if the lease has lasted until now.
func (t *Table) Thaw(ctx context.Context, name string) error {
	t.leases.mu.Lock()
	l := t.leases.all[name]
	if l != nil && !l.frozen {
		l = nil // nobody knows its name yet
	}
	t.leases.mu.Unlock()
	if l == nil {
		return errkind.New(errkind.NotFound, "the lease %.80q has ended before, or never was", name)
	}
	l.end(nil)
	if l.why != nil {
		return errkind.New(errkind.NotFound, "the lease %s has ended before: %v", name, l.why)
	}
	ctx, cancel := deadline.Early(ctx)
	defer cancel()
	select {
	case <-l.thawed:
		return l.result()
	case <-ctx.Done():
		return l.stuck()
	}
}

// Unfreeze ends the lease that has frozen the volume at path, before the volume is unmounted.
func (t *Table) Unfreeze(ctx context.Context, path string) error {
	if v := t.known(path); v != nil {
		return v.unfreeze(ctx)
	}
	return nil
}

// errEnding ends leases because the agent ends.
var errEnding = errkind.New(errkind.Aborted, "the agent ends, and with it the lease")

// EndLeases ends all leases, also those that are not complete, because the agent ends. There are no
// leases from then on.
func (t *Table) EndLeases() {
	a := t.leases
	a.mu.Lock()
	a.end()
	all := slices.Collect(maps.Values(a.all))
	frozen := slices.DeleteFunc(slices.Clone(all), func(l *lease) bool { return !l.frozen })
	a.mu.Unlock()
	for _, l := range frozen { // the call that makes another one ends it
		l.end(errEnding)
	}
	limit := time.After(hungLimit)
	for _, l := range all {
		select {
		case <-l.thawed:
		case <-limit:
			return
		}
	}
}

// toFreeze returns the volumes at the paths, in the order in which they are frozen: the last
// filesystem first, by its first mount, because it may be in a file of another one. beside are the
// other known mounts of the same filesystems.
func (t *Table) toFreeze(paths []string, length time.Duration) (named, beside []*Volume, err error) {
	if n := len(paths); n < 1 || n > maxFrozen {
		return nil, nil, errkind.New(errkind.InvalidArgument, "%d volumes: a lease has 1 to %d", n, maxFrozen)
	}
	if length < minLease || length > maxLease {
		return nil, nil, errkind.New(errkind.InvalidArgument, "a lease of %v: it lasts %v to %v", length, minLease, maxLease)
	}
	for _, path := range paths {
		v, err := t.Lookup(path)
		if err != nil {
			return nil, nil, err
		}
		if i := slices.IndexFunc(named, v.sharesFilesystem); i >= 0 {
			return nil, nil, errkind.New(errkind.InvalidArgument, "volumes %s and %s are one filesystem: name it once", named[i].Mountpoint, v.Mountpoint)
		}
		named = append(named, v)
	}
	mounts, err := mount.All()
	if err != nil {
		return nil, nil, err
	}
	mounted := func(v *Volume) int {
		return slices.IndexFunc(mounts, func(m *mount.Info) bool {
			return unix.Mkdev(uint32(m.Major), uint32(m.Minor)) == v.identity.Number
		})
	}
	slices.SortFunc(named, func(a, b *Volume) int { return mounted(b) - mounted(a) })
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, v := range t.volumes {
		beside = append(beside, v)
	}
	beside = slices.DeleteFunc(append(beside, t.hidden...), func(v *Volume) bool {
		return slices.Contains(named, v) || !slices.ContainsFunc(named, v.sharesFilesystem)
	})
	return named, beside, nil
}

// sharesFilesystem reports whether two volumes are mounts of one filesystem.
func (v *Volume) sharesFilesystem(o *Volume) bool {
	return v == o || v.identity.Number != 0 && v.identity.Number == o.identity.Number
}

// take freezes volumes, or none of them if it returns an error.
func (a *leases) take(ctx context.Context, named, beside []*Volume) (*lease, error) {
	limited, cancel := context.WithTimeout(ctx, freezeLimit)
	defer cancel()
	early, cancel := deadline.Early(limited)
	defer cancel()
	defer context.AfterFunc(a.ending, cancel)()
	l := a.newLease()
	err := l.freeze(early, named, beside)
	if err == nil {
		return l, nil
	}
	if a.ending.Err() != nil {
		err = errEnding
	}
	l.end(err)
	select {
	case <-l.thawed:
	case <-limited.Done():
	}
	return nil, err
}

// freeze locks the volumes, writes what is cached of them, all at once, and then freezes one after
// the other. If it fails, the caller ends the lease.
func (l *lease) freeze(ctx context.Context, named, beside []*Volume) error {
	parts, err := l.lock(ctx, named, beside)
	if err != nil {
		return err
	}
	for _, p := range parts {
		p.start(p.prepare)
	}
	for _, p := range parts {
		if err := p.wait(ctx); err != nil {
			return p.volume.freezeError(err)
		}
	}
	if err := l.leases.put(l); err != nil { // first, so that the next agent thaws it whenever this one is killed
		return err
	}
	for _, p := range parts {
		p.start(p.freeze)
		if err := p.wait(ctx); err != nil {
			return p.volume.freezeError(err)
		}
	}
	if err := ctx.Err(); err != nil {
		return errkind.New(errkind.DeadlineExceeded, "the volumes were not frozen in time, and are thawed: %w", err)
	}
	l.releaseUnfrozen()
	l.leases.mu.Lock()
	l.frozen = l.leases.ending.Err() == nil
	l.leases.mu.Unlock()
	if !l.frozen {
		return errEnding
	}
	for _, p := range l.all() {
		if p.frozen || p.of != nil && p.of.frozen {
			p.mark()
		}
	}
	return nil
}

// releaseUnfrozen releases all mounts of the filesystems that cannot be frozen: they may be used.
func (l *lease) releaseUnfrozen() {
	for _, p := range l.all() {
		if p.of == nil && !p.frozen {
			p.release()
		}
	}
	for _, p := range l.all() {
		if p.of != nil && !p.of.frozen { // after the part that it waits for
			p.release()
		}
	}
}

// lock locks all volumes, and returns the parts of those that are named, in their order.
func (l *lease) lock(ctx context.Context, named, beside []*Volume) ([]*part, error) {
	all := slices.Concat(named, beside)
	inOrder(all)
	parts := make([]*part, len(named))
	for _, v := range named {
		if err := l.leases.refuseOwn(v); err != nil {
			return nil, err
		}
		if err := v.awaitLook(ctx); err != nil {
			return nil, err
		}
	}
	for _, v := range all {
		done, err := v.alone(ctx)
		if err != nil {
			return nil, err
		}
		p := l.add(v, nil, done)
		if i := slices.Index(named, v); i >= 0 {
			parts[i] = p
		}
	}
	for _, p := range l.parts {
		if !slices.Contains(parts, p) {
			p.of = parts[slices.IndexFunc(named, p.volume.sharesFilesystem)]
		}
	}
	return parts, nil
}

// awaitLook waits until a volume's watch has looked once, because GetVolumeStats waits for that,
// and a watch does not look during a lease.
func (v *Volume) awaitLook(ctx context.Context) error {
	if v.watch == nil {
		return nil
	}
	if _, err := v.watch.Conditions(ctx); err != nil {
		return errkind.New(errkind.DeadlineExceeded, "volume %s: %w: call again", v.Mountpoint, err)
	}
	return nil
}

// prepare opens the volume and writes what is cached of it, so that the freeze itself is short.
func (p *part) prepare() error {
	root, err := p.lease.leases.kernel.open(p.volume)
	if err != nil {
		return err
	}
	p.root = root
	return p.lease.leases.kernel.sync(root)
}

func (p *part) freeze() error {
	err := p.lease.leases.kernel.freeze(p.root)
	if !errors.Is(err, filesystem.ErrCannotFreeze) {
		p.frozen, p.consistency = err == nil, Frozen
		return err
	}
	p.consistency = Synced
	if mount.IsServed(p.volume.FSType) {
		p.consistency = CrashConsistent
	}
	return p.lease.leases.kernel.sync(p.root)
}

// refuseOwn refuses a filesystem from which the agent runs, or to which it writes: it could not
// thaw it.
func (a *leases) refuseOwn(v *Volume) error {
	own := []string{"/"}
	if a.state != nil {
		own = append(own, filepath.Dir(a.state.Path()))
	}
	for _, path := range own {
		at, err := mount.Enclosing(path)
		if err != nil {
			return err
		}
		m, err := mount.Topmost(at)
		if err != nil {
			return err
		}
		if m != nil && v.identity.Number == mount.Identify(m).Number {
			return errkind.New(errkind.FailedPrecondition, "volume %s cannot be frozen: the agent itself needs its filesystem, for %s", v.Mountpoint, path)
		}
	}
	return nil
}

// freezeError gives an error of a freeze its kind.
func (v *Volume) freezeError(err error) error {
	switch {
	case errkind.Of(err) != errkind.Internal:
		return err
	case errors.Is(err, filesystem.ErrFrozen):
		return errkind.New(errkind.FailedPrecondition, "volume %s: another program in the guest has frozen it, and must thaw it: %w", v.Mountpoint, err)
	case errors.Is(err, unix.EIO), errors.Is(err, unix.EROFS), errors.Is(err, unix.ESHUTDOWN), errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EPERM):
		return errkind.New(errkind.FailedPrecondition, "volume %s cannot be frozen: %w", v.Mountpoint, err)
	}
	return errkind.New(errkind.Internal, "volume %s cannot be frozen: %w", v.Mountpoint, err)
}

// hold calls frozen, and returns after the end of the lease.
func (l *lease) hold(ctx context.Context, length time.Duration, frozen func(string, []FrozenVolume) error) error {
	// Before frozen, which may block as long as the caller reads nothing.
	defer time.AfterFunc(length, func() {
		l.end(errkind.New(errkind.Aborted, "the lease has ended after %v", length))
	}).Stop()
	defer context.AfterFunc(ctx, func() { l.end(ctx.Err()) })()
	var volumes []FrozenVolume
	for _, p := range l.all() {
		if p.of == nil {
			volumes = append(volumes, FrozenVolume{p.volume.Mountpoint, p.consistency})
		}
	}
	if err := frozen(l.name, volumes); err != nil {
		l.end(err)
	}
	<-l.ended
	limit := time.NewTimer(hungLimit)
	defer limit.Stop()
	select {
	case <-l.thawed:
		return l.result()
	case <-limit.C:
		return l.stuck()
	}
}
