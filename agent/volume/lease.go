package volume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/state"
)

// errFrozen refuses a call on a volume that a lease has frozen.
var errFrozen = errors.New("frozen by a lease")

// unlessFrozen is for calls that have nothing to do on a frozen volume: FIFREEZE has written
// everything, and there was no write since.
func unlessFrozen(err error) error {
	if errors.Is(err, errFrozen) {
		return nil
	}
	return err
}

// thawAgain is the pause between two attempts to thaw, after the kernel has refused one.
const thawAgain = time.Second

// leases are those of a table, until all their volumes are thawed.
type leases struct {
	kernel kernel
	ending context.Context // ends when the agent does
	end    context.CancelFunc

	mu    sync.Mutex
	all   map[string]*lease // by name
	state *state.File       // nil if no agent follows this one
	left  []record          // by an earlier agent, and not thawed yet
}

// kernel has the system calls of a lease, so that a test can make them hang.
type kernel struct {
	open               func(*Volume) (*os.File, error)
	sync, freeze, thaw func(*os.File) error
}

func newLeases() *leases {
	ending, end := context.WithCancel(context.Background())
	return &leases{all: map[string]*lease{}, ending: ending, end: end, kernel: kernel{
		open:   (*Volume).openRoot,
		sync:   func(root *os.File) error { return os.NewSyscallError("syncfs", unix.Syncfs(int(root.Fd()))) },
		freeze: filesystem.Freeze,
		thaw:   filesystem.Thaw,
	}}
}

// lease is a set of volumes that are frozen together.
type lease struct {
	name   string
	leases *leases
	parts  []*part // in the order in which they are locked; guarded by leases.mu after put
	frozen bool    // completely; guarded by leases.mu
	over   bool    // no part is added any more; guarded by leases.mu

	once   sync.Once
	ended  chan struct{} // closed when the volumes are to be thawed
	why    error         // nil if Thaw has ended the lease; set before ended is closed
	thawed chan struct{} // closed when all volumes are thawed

	mu     sync.Mutex
	broken error // a volume was thawed by another program
}

// part is one volume of a lease.
type part struct {
	lease       *lease
	volume      *Volume
	of          *part // of which this is another mount, which is locked only; or nil
	unlock      func()
	root        *os.File      // opened before the freeze, because a name may not be found in a frozen filesystem
	busy        chan struct{} // closed when the step in progress has ended; nil before the first step
	err         error         // of the last step
	consistency Consistency
	frozen      bool          // FIFREEZE has succeeded
	over        bool          // the volume is not this lease's any more; guarded by volume.mu
	released    chan struct{} // closed when the volume is thawed and unlocked
}

func (a *leases) newLease() *lease {
	return &lease{name: fmt.Sprintf("%016x", rand.Uint64()), leases: a, ended: make(chan struct{}), thawed: make(chan struct{})}
}

// join makes v part of the lease that has its filesystem, if there is one: the filesystem was
// mounted once more. v is new: nobody else knows it, and its watch has not begun. It does not write
// until the thaw (Target.Frozen), and looks meanwhile. A mount that was found after the lease's
// call had listed the mounts, and before put, is missed.
func (a *leases) join(v *Volume) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, l := range a.all {
		i := slices.IndexFunc(l.parts, func(p *part) bool { return p.of == nil && !p.isReleased() && v.sharesFilesystem(p.volume) })
		if i < 0 || l.over {
			continue
		}
		v.growing <- struct{}{}
		v.frozen = l.add(v, l.parts[i], v.unlock)
		return
	}
}

// all returns the parts of a lease.
func (l *lease) all() []*part {
	l.leases.mu.Lock()
	defer l.leases.mu.Unlock()
	return slices.Clone(l.parts)
}

func (l *lease) add(v *Volume, of *part, unlock func()) *part {
	p := &part{lease: l, volume: v, of: of, unlock: unlock, released: make(chan struct{})}
	l.parts = append(l.parts, p)
	return p
}

// end thaws the volumes without blocking: thawed is closed when it is done. The reason is nil if
// Thaw has named the lease. Only the first call counts.
func (l *lease) end(why error) {
	l.once.Do(func() {
		l.why = why
		close(l.ended)
		go func() {
			l.leases.mu.Lock()
			l.over = true
			l.leases.mu.Unlock()
			var wait sync.WaitGroup
			for _, p := range l.all() {
				wait.Go(p.release)
			}
			wait.Wait()
			l.leases.remove(l)
			close(l.thawed)
		}()
	})
}

// result is the error for the lease's caller, after its end.
func (l *lease) result() error {
	if l.why != nil {
		return l.why
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.broken
}

// stuck is the error for a caller that does not wait any longer for the thaw.
func (l *lease) stuck() error {
	var frozen []string
	for _, p := range l.all() {
		if !p.isReleased() {
			frozen = append(frozen, p.volume.Mountpoint)
		}
	}
	if l.why != nil {
		return errkind.New(errkind.Of(l.why), "%w; %v: not thawed yet, the disk does not answer; it is thawed when the disk does", l.why, frozen)
	}
	return errkind.New(errkind.DeadlineExceeded, "the lease %s: %v: not thawed yet, the disk does not answer; it is thawed when the disk does", l.name, frozen)
}

// start begins a step that may block as long as a disk does.
func (p *part) start(step func() error) {
	busy := make(chan struct{})
	p.busy = busy
	go func() {
		defer close(busy)
		p.err = step()
	}()
}

// wait returns the error of the step in progress, or that of ctx. Then the step goes on.
func (p *part) wait(ctx context.Context) error {
	select {
	case <-p.busy:
		return p.err
	case <-ctx.Done():
		return errkind.New(errkind.DeadlineExceeded, "volume %s: not frozen in time, the disk below %s does not answer; the volumes are thawed: %w", p.volume.Mountpoint, p.volume.Device.Path, context.Cause(ctx))
	}
}

// release thaws and unlocks the volume, after a step in progress has ended. It blocks as long as
// the disk does.
func (p *part) release() {
	if p.isReleased() {
		return
	}
	defer close(p.released)
	defer p.unlock()
	if p.of != nil {
		<-p.of.released
	}
	if p.busy != nil {
		<-p.busy
	}
	if p.frozen {
		p.thaw()
	}
	if p.root != nil {
		p.root.Close()
	}
	p.volume.mu.Lock()
	was := p.volume.frozen == p
	p.over, p.volume.frozen = true, nil
	p.volume.mu.Unlock()
	if was {
		p.volume.watchers.changed(p.volume)
	}
}

func (p *part) isReleased() bool {
	select {
	case <-p.released:
		return true
	default:
		return false
	}
}

func (p *part) thaw() {
	for {
		err := p.lease.leases.kernel.thaw(p.root)
		if errors.Is(err, filesystem.ErrNotFrozen) {
			p.lease.mu.Lock()
			defer p.lease.mu.Unlock()
			p.lease.broken = errkind.New(errkind.Aborted, "volume %s was thawed by another program in the guest: a copy that was made meanwhile may not be consistent", p.volume.Mountpoint)
			return
		}
		if err == nil {
			return
		}
		<-time.After(thawAgain)
	}
}

// mark makes the volume frozen for all other calls.
func (p *part) mark() {
	v := p.volume
	v.mu.Lock()
	if !p.over {
		v.frozen = p
		if v.froze != nil {
			close(v.froze)
			v.froze = nil
		}
	}
	v.mu.Unlock()
	v.watchers.changed(v)
}

// isFrozen reports whether a lease has frozen the volume.
func (v *Volume) isFrozen() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.frozen != nil
}

// untilFrozen returns a channel that is closed as soon as a lease has frozen the volume.
func (v *Volume) untilFrozen() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.frozen != nil {
		now := make(chan struct{})
		close(now)
		return now
	}
	if v.froze == nil {
		v.froze = make(chan struct{})
	}
	return v.froze
}

// unfreeze ends the lease that has frozen the volume, and waits until ctx ends for the thaw.
func (v *Volume) unfreeze(ctx context.Context) error {
	v.mu.Lock()
	p := v.frozen
	v.mu.Unlock()
	if p == nil {
		return nil
	}
	ctx, cancel := deadline.Early(ctx)
	defer cancel()
	p.lease.end(errkind.New(errkind.Aborted, "volume %s is to be unmounted: the lease has ended", v.Mountpoint))
	select {
	case <-p.released:
		return nil
	case <-ctx.Done():
		return errkind.New(errkind.DeadlineExceeded, "volume %s: not thawed in time, the disk below %s does not answer: %w", v.Mountpoint, v.Device.Path, context.Cause(ctx))
	}
}

// aloneAndThawed is alone for a caller that unmounts the volume.
func (v *Volume) aloneAndThawed(ctx context.Context) (done func(), err error) {
	for {
		if err := v.unfreeze(ctx); err != nil {
			return nil, err
		}
		done, err = v.alone(ctx)
		if !errors.Is(err, errFrozen) {
			return done, err
		}
	}
}

// openRoot opens the root of the volume, and checks that it is this volume's.
func (v *Volume) openRoot() (*os.File, error) {
	root, err := os.OpenFile(v.Mountpoint, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	mine, err := v.identity.Has(root)
	if err == nil && !mine {
		err = errkind.New(errkind.NotFound, "volume %s was unmounted meanwhile", v.Mountpoint)
	}
	if err != nil {
		root.Close()
		return nil, err
	}
	return root, nil
}

// inOrder sorts volumes as leases lock them.
func inOrder(volumes []*Volume) {
	slices.SortFunc(volumes, func(a, b *Volume) int {
		return cmp.Or(strings.Compare(a.Mountpoint, b.Mountpoint), cmp.Compare(a.identity.ID, b.identity.ID), cmp.Compare(a.identity.Unique, b.identity.Unique))
	})
}
