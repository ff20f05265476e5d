package filesystem

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
)

// The kernel writes a group's headers with the rest of its log, in a worker that runs every
// fs.xfs.xfssyncd_centisecs (Documentation/admin-guide/xfs.rst). Up to some kernel between 6.1 and
// 7.3, it also writes them at once during a syncfs while vm.laptop_mode is on (xfs_fs_sync_fs in
// fs/xfs/xfs_super.c).
const (
	xfsSyncInterval = "/proc/sys/fs/xfs/xfssyncd_centisecs"
	xfsSyncLeast    = "100" // one second; the default is 3000

	// wholeLook is the pause between two reads of the headers, because the kernel has no event for
	// their write. Every wholeKick-th read also requests the write. wholeLimit exceeds the worker's
	// default interval.
	wholeLook  = 5 * time.Millisecond
	wholeKick  = 50
	wholeLimit = 45 * time.Second
)

// xfsHurry makes the worker run every second: at once for filesystems that are mounted later, and
// for others after the worker's next run. If the setting cannot be changed, or xfs is not loaded
// yet, growths only take longer.
func xfsHurry() { _ = os.WriteFile(xfsSyncInterval, []byte(xfsSyncLeast), 0) }

// awaitWhole waits until both headers (AGF and AGI) on the disk show the full length, of each group
// whose number is below before. It fails after wholeLimit.
//
// The log may still have headers from the time when a group was the last one and short. Once groups
// follow it, recovery since Linux 6.5 takes such a logged header for damage ("xfs: AGF length has
// never been bounds checked"), unless the header on the disk is newer: recovery then skips the
// logged one. (If somebody has shrunk a group and grown it again, its header may show the full
// length too early; the agent never shrinks.)
//
// Before a growth by the agent the wait risks nothing, because nothing has been changed yet. After
// somebody else's growth a power cut is dangerous until the wait is over.
//
// If writers allocate in such a group all the time, the kernel may find its header locked whenever
// it comes to write it. The wait then takes several runs of the kernel's worker (xfsSyncInterval).
func (d *xfsDisk) awaitWhole(ctx context.Context, g *xfsGeom, before uint64) error {
	if err := d.findWhole(context.WithoutCancel(ctx), g, before); err != nil || d.Proven.whole >= before {
		return err
	}
	return d.awaitWritten(ctx, g, before)
}

// findWhole reads the headers of the groups that were not proven yet, and whose number is below
// before, up to the first one without its full length. It stops when ctx ends; a later call goes on
// from there.
func (d *xfsDisk) findWhole(ctx context.Context, g *xfsGeom, before uint64) error {
	for d.Proven.whole < before {
		if err := ctx.Err(); err != nil {
			return err
		}
		all, err := d.readMany(g.headerBytes(), g.starts(d.Proven.whole, before))
		if err != nil {
			return err
		}
		for _, headers := range all {
			if whole, err := d.areWhole(g, d.Proven.whole, headers); !whole || err != nil {
				return err
			}
			d.Proven.whole++
		}
	}
	return nil
}

// awaitWritten is awaitWhole if a header is still to be written.
func (d *xfsDisk) awaitWritten(ctx context.Context, g *xfsGeom, before uint64) error {
	ctx, cancel := context.WithTimeout(ctx, wholeLimit)
	defer cancel()
	looks := time.NewTicker(wholeLook)
	defer looks.Stop()
	for look := 0; d.Proven.whole < before; look++ {
		whole, err := d.isWhole(g, d.Proven.whole)
		if err != nil {
			return err
		}
		if whole {
			if err := d.findWhole(context.WithoutCancel(ctx), g, before); err != nil {
				return err
			}
			continue
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(d.Dir.Fd()), &st); err != nil {
			return &fs.PathError{Op: "fstat", Path: d.Dir.Name(), Err: err} // the filesystem has shut down
		}
		if look%wholeKick == 0 {
			xfsHurry()
			laptop.syncfs(d.Dir)
		}
		select {
		case <-looks.C:
		case <-ctx.Done():
			return errkind.New(errkind.DeadlineExceeded, "xfs on %s, %d blocks: the header of group %d is not written to the disk yet, and later groups must wait for it: try again: %w", d.Disk.Name(), g.dataBlocks(), d.Proven.whole, ctx.Err())
		}
	}
	return nil
}

// xfsHeaders are the magic numbers of a group's first sectors: its superblock and two headers.
var xfsHeaders = []string{"XFSB", "XAGF", "XAGI"}

// headerBytes is the length of a group's first sectors, those of xfsHeaders.
func (g *xfsGeom) headerBytes() int { return len(xfsHeaders) * int(g.sectorSize()) }

// start returns where a group begins, in bytes.
func (g *xfsGeom) start(group uint64) uint64 {
	return group * uint64(g.groupBlocks()) * uint64(g.blockSize())
}

// starts returns where groups begin, in bytes: from the first on, those whose number is below
// before, but no more than readMany can read at once.
func (g *xfsGeom) starts(first, before uint64) (all []uint64) {
	for group := first; group < min(before, first+directBytes/uint64(g.sectorSize())); group++ {
		all = append(all, g.start(group))
	}
	return all
}

// isWhole reports whether the headers of a group on the disk have its full length. It notes a
// superblock of the group that is older than the geometry. The kernel writes those after a growth
// is in the log, and recovery does not: if QEMU is killed in between, they keep the old size. If
// one cannot be written, the others are, and only the call that grew learns of it. xfs_repair would
// make the filesystem as small as such a superblock says.
func (d *xfsDisk) isWhole(g *xfsGeom, group uint64) (bool, error) {
	headers, err := d.read(g.headerBytes(), g.start(group))
	if err != nil {
		return false, err
	}
	return d.areWhole(g, group, headers)
}

// areWhole is isWhole for headers that were read.
func (d *xfsDisk) areWhole(g *xfsGeom, group uint64, headers []byte) (bool, error) {
	if super, err := parseXFSSuper(headers); err != nil || super.blocks < g.dataBlocks() {
		d.Proven.stale = true
	}
	for i, magic := range xfsHeaders[1:] {
		length, err := xfsHeaderLength(headers[(i+1)*int(g.sectorSize()):], magic, group)
		if err != nil {
			return false, fmt.Errorf("xfs on %s, group %d: %w", d.Disk.Name(), group, err)
		}
		if length < g.groupBlocks() {
			return false, nil
		}
	}
	return true, nil
}

// xfsHeaderLength returns the number of blocks of a group: struct xfs_agf and struct xfs_agi
// (fs/xfs/libxfs/xfs_format.h) have the group's number at 8 and its length at 12.
func xfsHeaderLength(header []byte, magic string, group uint64) (blocks uint32, err error) {
	if len(header) < 16 || !bytes.HasPrefix(header, []byte(magic)) || uint64(binary.BigEndian.Uint32(header[8:])) != group {
		return 0, fmt.Errorf("its %s header is invalid: %w", magic, unix.EUCLEAN)
	}
	return binary.BigEndian.Uint32(header[12:]), nil
}

// laptop controls the guest's laptop mode, which is on during a syncfs.
var laptop = laptopSwitch{file: "/proc/sys/vm/laptop_mode"}

// laptopMark is the number of seconds that marks laptop mode as set by an agent, so that a later
// agent can undo the setting if this one is killed.
const laptopMark = "1009"

type laptopSwitch struct {
	file  string
	mu    sync.Mutex
	users int
	was   []byte // the value to restore
}

// laptopLimit bounds how long laptop mode stays on if a syncfs takes long, for instance on a disk
// that hangs, because the mode affects the whole guest.
const laptopLimit = time.Second

// syncfs calls syncfs(2) in laptop mode. It ignores errors, because the caller checks the result on
// the disk.
func (l *laptopSwitch) syncfs(dir *os.File) {
	fd, err := unix.FcntlInt(dir.Fd(), unix.F_DUPFD_CLOEXEC, 0) // the duplicate may outlive the call
	if err != nil {
		return
	}
	l.on()
	defer l.off()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer unix.Close(fd)
		_ = unix.Syncfs(fd)
	}()
	limit := time.NewTimer(laptopLimit)
	defer limit.Stop()
	select {
	case <-done:
	case <-limit.C:
	}
}

// EndLaptopMode undoes the setting of an agent that was killed. It must run before any growth.
func EndLaptopMode() { laptop.end() }

func (l *laptopSwitch) end() {
	if is, err := os.ReadFile(l.file); err == nil && string(bytes.TrimSpace(is)) == laptopMark {
		_ = os.WriteFile(l.file, []byte("0"), 0)
	}
}

func (l *laptopSwitch) on() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users++; l.users > 1 {
		return
	}
	l.was, _ = os.ReadFile(l.file)
	if l.was = bytes.TrimSpace(l.was); len(l.was) == 0 || string(l.was) == laptopMark {
		l.was = []byte("0")
	}
	_ = os.WriteFile(l.file, []byte(laptopMark), 0)
}

func (l *laptopSwitch) off() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users--; l.users == 0 {
		_ = os.WriteFile(l.file, l.was, 0)
	}
}
