package holders

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Holder is a user of a disk on this host.
type Holder struct {
	PID     int    `json:"pid,omitempty"`     // 0 if the holder is not a process, or an unknown one
	Program string `json:"program,omitempty"` // the process's own name for itself
	How     string `json:"how"`
	reads   bool   // a process that has the disk open, but not for writing
}

// String describes the holder as a clause.
func (h Holder) String() string {
	switch {
	case h.PID != 0 && h.Program != "":
		return fmt.Sprintf("%s (pid %d) %s", h.Program, h.PID, h.How)
	case h.PID != 0:
		return fmt.Sprintf("pid %d %s", h.PID, h.How)
	default:
		return h.How
	}
}

// Found is the result of a search for holders.
type Found struct {
	Holders []Holder
	// Unseen is the number of processes that could not be examined: other users' processes, if this
	// process is not root's.
	Unseen int
}

// Find searches for all holders of the disk. A holder of one of its partitions counts too; so does
// a holder of the whole disk if this one is a partition, and a holder of the file below it if it is
// a loop device. Find ignores the processes for which except returns true, and this Disk's own
// descriptor.
func (d *Disk) Find(except func(pid int) bool) (Found, error) {
	s := &search{disk: d, wanted: d.relatives(), except: except}
	if err := s.processes(); err != nil {
		return Found{}, fmt.Errorf("find who uses disk %s: %w", d.name, err)
	}
	// If a process was found, the lock is probably that process's.
	if holder, err := d.locked(); err != nil {
		return Found{}, err
	} else if holder != nil && len(s.found.Holders) == 0 && except == nil {
		s.add(*holder)
	}
	for _, look := range []func() error{s.mounts, s.swaps, s.loops, s.stacked} {
		if err := look(); err != nil {
			return Found{}, fmt.Errorf("find who uses disk %s: %w", d.name, err)
		}
	}
	return s.found, nil
}

// Err returns nil if no holder was found, and otherwise an *InUseError.
func (f Found) Err(disk string) error {
	if len(f.Holders) == 0 {
		return nil
	}
	return &InUseError{disk, f.Holders}
}

const (
	// settleLimit is how long to wait for processes that only read a block device. lookAgain is the
	// pause between searches: the kernel has no event for the closing of a file.
	settleLimit = 5 * time.Second
	lookAgain   = 100 * time.Millisecond
)

// Settled is Find for a disk that may have transient readers: udev briefly reads each block device
// that was closed after writing. Settled waits for such readers, and returns them as holders only
// if they stay.
func (d *Disk) Settled(ctx context.Context, except func(pid int) bool) (Found, error) {
	return settled(ctx, d.block, func() (Found, error) { return d.Find(except) })
}

func settled(ctx context.Context, block bool, find func() (Found, error)) (Found, error) {
	ctx, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	again := time.NewTicker(lookAgain)
	defer again.Stop()
	for {
		found, err := find()
		if err != nil || !block || !found.passing() {
			return found, err
		}
		select {
		case <-ctx.Done():
			return found, nil
		case <-again.C:
		}
	}
}

// passing reports whether there are holders and all of them are readers.
func (f Found) passing() bool {
	for _, h := range f.Holders {
		if !h.reads {
			return false
		}
	}
	return len(f.Holders) > 0
}

// search is one search for holders.
type search struct {
	disk   *Disk
	wanted map[identity]string // the disk and its relatives, with descriptions
	except func(pid int) bool
	found  Found
}

func (s *search) add(h Holder) { s.found.Holders = append(s.found.Holders, h) }

// itself is the description of the disk itself.
const itself = "it"

// relatives returns the disk and all objects that share bytes with it.
func (d *Disk) relatives() map[identity]string {
	all := map[identity]string{d.id: itself}
	if !d.block {
		return all
	}
	dir := resolved(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(d.id.device), unix.Minor(d.id.device)))
	relatives, _ := filepath.Glob(dir + "/*/partition") // no error: the pattern is well formed
	if _, err := os.Stat(dir + "/partition"); err == nil {
		relatives = append(relatives, dir) // dir is a part of its parent
	}
	for _, path := range relatives {
		sibling := filepath.Dir(path)
		if id, err := deviceIn(sibling); err == nil {
			all[id] = "/dev/" + filepath.Base(sibling)
		}
	}
	if id, name, err := loopStore(filepath.Base(dir)); err == nil {
		all[id] = name
	}
	return all
}

func resolved(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	return path
}

// deviceIn reads a block device's number from its directory in sysfs.
func deviceIn(dir string) (identity, error) {
	text, err := os.ReadFile(filepath.Join(dir, "dev"))
	if err != nil {
		return identity{}, err
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(string(text), "%d:%d", &major, &minor); err != nil {
		return identity{}, err
	}
	return identity{unix.Mkdev(major, minor), 0}, nil
}

// is reports whether a path leads to the disk or a relative, and returns the description of that.
func (s *search) is(path string) (what string, ok bool) {
	st, err := statx(unix.AT_FDCWD, path, 0)
	if err != nil {
		return "", false
	}
	id, ok := identityOf(st)
	if !ok {
		return "", false
	}
	what, ok = s.wanted[id]
	return what, ok
}

func (s *search) processes() error {
	names, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name.Name())
		if err != nil || s.except != nil && s.except(pid) {
			continue
		}
		if err := s.process(pid); errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
			s.found.Unseen++
		} else if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH) { // ENOENT and ESRCH: the process has ended
			return err
		}
	}
	return nil
}

// process examines the open files of one process, and adds the process at most once.
func (s *search) process(pid int) error {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	names, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	how := ""
	for _, name := range names {
		if pid == os.Getpid() && s.disk.has(name.Name()) {
			continue
		}
		path := filepath.Join(dir, name.Name())
		// Most descriptors are sockets and pipes, whose links are not paths.
		if link, err := os.Readlink(path); err != nil || !strings.HasPrefix(link, "/") {
			continue
		}
		if what, ok := s.is(path); ok {
			how = "has " + what + " open" + purpose(pid, name.Name())
			if strings.HasSuffix(how, forWriting) {
				break
			}
		}
	}
	if how != "" {
		s.add(Holder{PID: pid, Program: programOf(pid), How: how, reads: !strings.HasSuffix(how, forWriting)})
	}
	return nil
}

const forWriting = " for writing"

// purpose returns a suffix if a process has opened a file for writing.
func purpose(pid int, fd string) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, fd))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "flags:"); ok {
			flags, err := strconv.ParseUint(strings.TrimSpace(value), 8, 64)
			if err == nil && flags&unix.O_ACCMODE != unix.O_RDONLY {
				return forWriting
			}
		}
	}
	return ""
}

// programOf returns a process's name for itself, made printable because a process may choose any
// name.
func programOf(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return ""
	}
	return Printable(strings.TrimSpace(string(text)))
}

// Printable makes an untrusted name safe for a terminal.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, strings.ToValidUTF8(text, "?"))
}

func (s *search) mounts() error {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		what, ok := "", false
		if filepath.IsAbs(m.Source) {
			what, ok = s.is(m.Source)
		}
		if !ok {
			what, ok = s.wanted[identity{unix.Mkdev(uint32(m.Major), uint32(m.Minor)), 0}]
		}
		if ok {
			s.add(Holder{How: what + " is mounted on " + Printable(m.Mountpoint)})
		}
	}
	return nil
}

// swaps reads the list of swap spaces (proc(5)). A line starts with a path.
func (s *search) swaps() error {
	f, err := os.Open("/proc/swaps")
	if errors.Is(err, unix.ENOENT) {
		return nil // the kernel has no swap
	}
	if err != nil {
		return err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		path, _, _ := strings.Cut(lines.Text(), " ")
		path, _, _ = strings.Cut(path, "\t")
		if what, ok := s.is(unescaped(path)); ok && filepath.IsAbs(path) {
			s.add(Holder{How: what + " is swap space"})
		}
	}
	return nil
}

// unescaped decodes the octal escapes of space, tab, newline and backslash.
func unescaped(path string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(path)
}

// loops examines all loop devices except the disk itself.
func (s *search) loops() error {
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	for _, path := range paths {
		dir := filepath.Dir(filepath.Dir(path))
		if id, err := deviceIn(dir); err == nil && id == s.disk.id {
			continue
		}
		id, _, err := loopStore(filepath.Base(dir))
		if err != nil {
			continue // the loop device was removed meanwhile
		}
		if what, ok := s.wanted[id]; ok {
			s.add(Holder{How: fmt.Sprintf("/dev/%s is a loop device on %s", filepath.Base(dir), what)})
		}
	}
	return nil
}

// loopStore returns the object below a loop device. It asks the kernel. If the kernel does not
// answer this user, loopStore follows the path in sysfs, which may lead elsewhere by now.
func loopStore(loop string) (identity, string, error) {
	text, err := os.ReadFile(filepath.Join("/sys/block", loop, "loop/backing_file"))
	if err != nil {
		return identity{}, "", err
	}
	path := strings.TrimSuffix(string(text), "\n")
	if id, err := askLoop("/dev/" + loop); err == nil {
		return id, Printable(path), nil
	}
	st, err := statx(unix.AT_FDCWD, path, 0)
	if err != nil {
		return identity{}, "", err
	}
	id, _ := identityOf(st)
	return id, Printable(path), nil
}

// askLoop reads the store of a loop device from the kernel (loop(4), LOOP_GET_STATUS64).
func askLoop(path string) (identity, error) {
	f, err := os.Open(path)
	if err != nil {
		return identity{}, err
	}
	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if err != nil {
		return identity{}, err
	}
	if info.Rdevice != 0 {
		return identity{info.Rdevice, 0}, nil
	}
	return identity{info.Device, info.Inode}, nil
}

// stacked looks for devices that the kernel has built on a block device or its partitions:
// device-mapper, md.
func (s *search) stacked() error {
	for id, what := range s.wanted {
		if id.inode != 0 {
			continue
		}
		dir := fmt.Sprintf("/sys/dev/block/%d:%d/holders", unix.Major(id.device), unix.Minor(id.device))
		names, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		for _, name := range names {
			holder := "/dev/" + name.Name()
			if mapped, err := os.ReadFile(filepath.Join(dir, name.Name(), "dm/name")); err == nil {
				holder += " (" + Printable(strings.TrimSpace(string(mapped))) + ")"
			}
			s.add(Holder{How: holder + " is built on " + what})
		}
	}
	return nil
}
