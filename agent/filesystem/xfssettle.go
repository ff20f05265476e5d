package filesystem

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/refusal"
)

// The kernel writes an xfs's superblock out with the rest of its log, by a worker
// that runs every fs.xfs.xfssyncd_centisecs (Documentation/admin-guide/xfs.rst),
// and, up to some kernel between 6.1 and 7.3, at once within a syncfs while
// vm.laptop_mode is on (xfs_fs_sync_fs in fs/xfs/xfs_super.c). FIFREEZE would
// write it out as well, and is not used: it stops every writer for as long as
// anybody's write call takes, which may be for ever.
const (
	xfsSyncInterval = "/proc/sys/fs/xfs/xfssyncd_centisecs"
	xfsSyncLeast    = "100" // a second; by default it is 3000
	laptopMode      = "/proc/sys/vm/laptop_mode"

	// settleLook is the pause between two looks at the superblock on the disk: the
	// kernel has no event for its write. settleLimit exceeds the worker's default
	// interval.
	settleLook  = 5 * time.Millisecond
	settleLimit = 45 * time.Second
)

// xfsHurry has the worker run every second, for filesystems that are mounted from
// now on, and for others after its next turn. Where it is refused, or xfs is not
// loaded yet, it only takes longer.
func xfsHurry() { _ = os.WriteFile(xfsSyncInterval, []byte(xfsSyncLeast), 0) }

// xfsSettle waits for the superblock on the disk.
func xfsSettle(ctx context.Context, m Mounted) error {
	ctx, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	defer unix.Munmap(page)
	// Not by the page cache, which xfs writes past.
	disk, err := os.OpenFile(m.Disk.Name(), os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer disk.Close()
	looks := time.NewTicker(settleLook)
	defer looks.Stop()
	for kicked := false; ; kicked = true {
		g, err := readXFSGeom(m)
		if err != nil {
			return err
		}
		if _, err := disk.ReadAt(page, 0); err != nil {
			return err
		}
		s, err := parseXFSSuper(page)
		if err != nil {
			return fmt.Errorf("%s: %w", disk.Name(), err)
		}
		if s.blocks >= g.dataBlocks() {
			return nil
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(m.Dir.Fd()), &st); err != nil {
			return &fs.PathError{Op: "fstat", Path: m.Dir.Name(), Err: err} // it has shut down
		}
		if !kicked {
			xfsHurry()
			laptop.syncfs(m.Dir)
		}
		select {
		case <-looks.C:
		case <-ctx.Done():
			return refusal.New(refusal.DeadlineExceeded, "xfs on %s has grown to %d blocks, and its superblock on the disk is still to be written: try again: %w", disk.Name(), g.dataBlocks(), ctx.Err())
		}
	}
}

// laptop is the guest's laptop mode, which is on while somebody is in syncfs.
var laptop laptopSwitch

// laptopMark is the number of seconds that stands for our own use of it, so that
// one that an agent did not live to take back is known.
const laptopMark = "1009"

type laptopSwitch struct {
	mu    sync.Mutex
	users int
	was   []byte // what it is set back to
}

// laptopLimit is how long laptop mode is on for a syncfs that takes its time, on a
// disk that hangs for one: it is the whole guest's.
const laptopLimit = time.Second

// syncfs calls syncfs(2) in laptop mode. Errors are not told: what comes of it is
// looked at.
func (l *laptopSwitch) syncfs(dir *os.File) {
	fd, err := unix.FcntlInt(dir.Fd(), unix.F_DUPFD_CLOEXEC, 0) // it may outlive the call
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

// EndLaptopMode takes back what an agent did not live to take back. It goes before
// any growth.
func EndLaptopMode() {
	if is, err := os.ReadFile(laptopMode); err == nil && string(bytes.TrimSpace(is)) == laptopMark {
		_ = os.WriteFile(laptopMode, []byte("0"), 0)
	}
}

func (l *laptopSwitch) on() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users++; l.users > 1 {
		return
	}
	l.was, _ = os.ReadFile(laptopMode)
	if l.was = bytes.TrimSpace(l.was); len(l.was) == 0 || string(l.was) == laptopMark {
		l.was = []byte("0")
	}
	_ = os.WriteFile(laptopMode, []byte(laptopMark), 0)
}

func (l *laptopSwitch) off() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users--; l.users == 0 {
		_ = os.WriteFile(laptopMode, l.was, 0)
	}
}
