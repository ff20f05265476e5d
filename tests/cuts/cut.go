package cuts

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/directvol/directvol/tests/cuts/logwrites"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// The kinds of cut.
const (
	kill   = "kill"
	replay = "replay"
)

// killWithin is the maximum time from the start of all writers to a kill, as a base for vm.Limit,
// so that about as much happens before the kill in an emulated guest.
const killWithin = time.Second

// killWhileGrowing kills the guest at a moment chosen by the seed while its volumes grow. It
// returns the errors of volumes that failed before the kill.
func killWhileGrowing(ctx context.Context, g *vm.Guest, volumes []*volume, random *rand.Rand) map[*volume]error {
	failed := map[*volume]error{}
	var mu sync.Mutex
	var running sync.WaitGroup
	killed, anyFailed := make(chan struct{}), make(chan struct{}, len(volumes))
	for _, v := range volumes {
		steps := rand.New(rand.NewPCG(random.Uint64(), 0))
		fails := func(err error) {
			select {
			case <-killed: // the kill is the cause of the error
			default:
				mu.Lock()
				defer mu.Unlock()
				failed[v] = errors.Join(failed[v], err)
				anyFailed <- struct{}{}
			}
		}
		running.Go(func() {
			if err := v.note(ctx); err != nil {
				fails(err)
			}
		})
		running.Go(func() {
			if err := v.keepGrowing(ctx, steps); err != nil {
				fails(err)
			}
		})
	}
	moment := time.NewTimer(time.Duration(random.Int64N(int64(vm.Limit(killWithin)))))
	defer moment.Stop()
	select {
	case <-moment.C:
	case <-anyFailed:
	case <-ctx.Done():
	}
	close(killed)
	g.Kill()
	running.Wait()
	return failed
}

// remains is the image of a volume after a cut, and the content that it must have.
type remains struct {
	*volume
	kind    string
	path    string         // path of the image
	how     string         // describes the cut for people
	ledger  *remote.Ledger // the blocks that the image must contain
	growths int            // the number of growths that had begun before the cut
	window  bool           // the cut fell into the window
	goal    uint64         // the size of the interrupted call, which is made again; 0 for any larger size
}

// untouched returns the path of a copy of the image as the cut left it, which was never mounted.
func (r *remains) untouched() string { return r.path + ".cut" }

func (r *remains) removeImages() error {
	return errors.Join(os.Remove(r.path), os.Remove(r.untouched()))
}

// killed returns the remains of the volume after a kill.
func (v *volume) killed() (*remains, error) {
	size, err := v.end(v.path)
	if err != nil {
		return nil, err
	}
	at, err := v.recorded()
	if err != nil {
		return nil, err
	}
	r := &remains{volume: v, kind: kill, path: v.path, ledger: v.writer.Ledger(), how: "QEMU was killed"}
	r.growths, r.window = v.windowAt(at, size)
	return r, nil
}

// windowAt returns the number of growths that had begun at a point of the record, and whether the
// superblock on the disk, with this size, did not have the last growth yet.
func (v *volume) windowAt(at int64, size uint64) (growths int, window bool) {
	for growths < len(v.growths) && v.growths[growths].at < at {
		growths++
	}
	return growths, growths > 0 && size <= v.growths[growths-1].from
}

// replays is the record of a volume, which can be cut at any point.
type replays struct {
	*volume
	file    *os.File
	entries []logwrites.Entry
	windows [][2]int // index of the first and the last entry of each growth's window, if it has one
}

// errNoRecord is the error of a volume whose guest was killed before its first flush.
var errNoRecord = errors.New("the record is empty")

// replays reads the record. The caller closes the record's file.
func (v *volume) replays() (*replays, error) {
	file, err := os.Open(v.record)
	if err != nil {
		return nil, err
	}
	r := &replays{volume: v, file: file}
	size, err := v.recorded()
	if err == nil {
		r.entries, err = logwrites.Read(file, size)
	}
	if err == nil && len(r.entries) == 0 {
		err = errNoRecord
	}
	if err == nil {
		r.windows, err = r.findWindows()
	}
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("%s: %w", v.record, err)
	}
	return r, nil
}

// findWindows looks, after the beginning of each growth, for the first write of a superblock with a
// larger size than before.
func (r *replays) findWindows() ([][2]int, error) {
	super := vm.SuperblockOffset(r.fstype) + int64(r.kept)
	sizes := map[int]uint64{} // by the index of the entry that writes it
	for i, e := range r.entries {
		if !e.Writes(super) || !e.Writes(super+vm.SuperblockBytes-1) {
			continue
		}
		size, err := vm.FilesystemSize(r.fstype, shifted{r.file, e.Data - e.Offset + int64(r.kept)})
		if err != nil {
			return nil, fmt.Errorf("the entry that ends at %d: %w", e.End, err)
		}
		sizes[i] = size + r.kept
	}
	var windows [][2]int
	for _, g := range r.growths {
		first, last := -1, -1
		for i, e := range r.entries {
			if e.End <= g.at {
				continue
			}
			if sizes[i] > g.from {
				break
			}
			if last = i; first < 0 {
				first = i
			}
		}
		if first >= 0 {
			windows = append(windows, [2]int{first, last})
		}
	}
	return windows, nil
}

// shifted reads a file from another start offset.
type shifted struct {
	file *os.File
	by   int64
}

func (s shifted) ReadAt(p []byte, at int64) (int, error) { return s.file.ReadAt(p, at+s.by) }

// choose returns a point of the record. A directed point lies in a window, if there is one.
func (r *replays) choose(random *rand.Rand, directed bool) logwrites.Point {
	first, last := 0, len(r.entries)-1
	if directed && len(r.windows) > 0 {
		w := r.windows[random.IntN(len(r.windows))]
		first, last = w[0], w[1]
	}
	return logwrites.Point{
		At:    r.entries[first+random.IntN(last-first+1)].End,
		After: logwrites.After(random.IntN(int(logwrites.All) + 1)),
		Seed:  random.Uint64(),
	}
}

// cutAt makes the image of a point, at path.
func (r *replays) cutAt(p logwrites.Point, path string) (*remains, error) {
	left := &remains{volume: r.volume, kind: replay, path: path, how: fmt.Sprintf("cut at %d of its record, %v of what was written after the last flush, seed %d", p.At, p.After, p.Seed)}
	if err := vm.CopySparse(path, r.before); err != nil {
		return nil, err
	}
	image, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer image.Close()
	size := r.sizeAt(p.At)
	if err := image.Truncate(int64(size)); err != nil {
		return nil, err
	}
	if err := logwrites.Replay(image, int64(size), r.file, r.entries, p); err != nil {
		return nil, fmt.Errorf("%s: %w", left.how, err)
	}
	super, err := r.end(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", left.how, err)
	}
	blocks := uint64(0)
	for _, a := range r.acked {
		if a.at <= p.At {
			blocks = a.blocks
		}
	}
	left.ledger = r.writer.Ledger().First(blocks)
	left.growths, left.window = r.windowAt(p.At, super)
	return left, nil
}

// sizeAt returns the size of the disk at a point. The record does not contain block_resize, so the
// disk has its new size from the beginning of each growth: the host never shrinks it again.
func (r *replays) sizeAt(at int64) uint64 {
	size := uint64(0)
	for i, g := range r.growths {
		if i == 0 {
			size = g.from
		}
		if g.at <= at {
			size = g.to
		}
	}
	if size == 0 {
		size = r.size
	}
	return size
}
