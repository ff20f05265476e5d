// Package rescue makes a volume usable again that a power failure has left so that
// the kernel of its sandbox refuses to mount it: a throw-away VM with a newer kernel
// mounts it once, which recovers its log, and unmounts it. Afterwards a check on the
// host looks for what is left to mend, and changes nothing.
//
// The case it is made for: an xfs that was grown, and cut off before its primary
// superblock had the new size. Linux 6.1 then gives up in the recovery of its log
// ("structure needs cleaning"), at the first attempt at least; newer kernels recover
// it, and nothing is lost. xfs_repair -L would throw the log away, and files with it
// that fsync had acknowledged.
//
// Newer kernels follow the size as they recover the log, where it comes before what
// lies beyond the old one. After more than one growth it does not: the log has the
// superblock at the last growth, and the first one's groups before it. And a directory
// that was in the log before the growth, and was written out after it, leads into
// groups that recovery does not know of yet. Linux 7.3 refuses such volumes as 6.1
// does, at every attempt. Then, where the superblock of an old group proves that a growth is in the
// log (provenGrowth), the primary one is given a size with which recovery can begin,
// and the mount is tried again.
//
// An ext4 that was grown may be refused by every kernel too: mountReplayed. Then
// e2fsck -p replays its journal on this host, and the mount is tried again. These two
// are all that is written outside of a VM.
//
// A disk that somebody on this host has is left alone: package holders.
package rescue

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/fsck"
	"github.com/directvol/directvol/host/holders"
	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/host/registry"
	"github.com/directvol/directvol/host/sandbox"
)

// Config says what to rescue, and with what.
type Config struct {
	// Disk is an image file or a block device that holds xfs or ext4.
	Disk string
	// Kernel and Image are what the VM boots: files.
	Kernel, Image string
	// Directvol is this program, for hosts without /dev/vhost-vsock; see qemu.Config.
	Directvol string
	// Timeout limits what happens in each VM, from its start to its power-off, and
	// CheckTimeout each run of e2fsck or xfs_repair; 0 is a limit by the disk's size.
	Timeout, CheckTimeout time.Duration
	// Progress is told of each step, before it and after it. It may be nil.
	Progress func(Step)
}

// Step is one of a rescue's.
type Step struct {
	Name string
	// Done is false before the step. Detail, Err and Took are of one that is done.
	Done   bool
	Detail string
	Err    error
	Took   time.Duration
}

// Report is what has become of a disk. It is as JSON what directvol rescue --json prints.
type Report struct {
	Disk   string `json:"disk"`
	FSType string `json:"fstype"` // "" where it was not identified
	Kernel string `json:"kernel"` // the release that has mounted it, or was to
	// Mounted is set when it was mounted and unmounted again.
	Mounted bool `json:"mounted"`
	// Recovered says whether the mount has recovered a log: yes, no or unknown.
	Recovered string `json:"recovered"`
	// Attempts is how often a VM's kernel was asked to mount it.
	Attempts int `json:"attempts"`
	// Superblock is what was written into the primary superblock of an xfs that was
	// refused otherwise, nil where that was not needed or not proven.
	Superblock *Correction `json:"superblock,omitempty"`
	// Replay is the e2fsck -p that was to replay the journal of an ext4 that was
	// refused otherwise, nil where that was not needed. What it says it has done to
	// the disk is in its output.
	Replay *fsck.Run `json:"replay,omitempty"`
	// KernelLog is what the kernels of the VMs have said of the filesystem.
	KernelLog []string `json:"kernel_log"`
	// Fsck is the check afterwards, nil where it was not run.
	Fsck *fsck.Run `json:"fsck"`
	// Unseen is how many processes of this host could not be asked whether they have the disk.
	Unseen int `json:"unseen_processes"`
	// Holders are those because of whom the disk was left alone.
	Holders []holders.Holder `json:"holders,omitempty"`
	// Error is why it failed, "" where it did not.
	Error string `json:"error,omitempty"`
}

// The values of Report.Recovered.
const (
	RecoveredYes     = "yes"
	RecoveredNo      = "no"
	RecoveredUnknown = "unknown"
)

// rescue is one that is under way.
type rescue struct {
	Config
	disk   *holders.Disk
	lock   *registry.Lock // of the disk as a store, nil while a VM has it
	found  found
	phase  string
	said   []string // by the kernel of the last VM
	tried  string   // what became of the superblock, for the error
	report Report
	// attempt has a VM mount the disk: inVM, but in tests.
	attempt func(context.Context) error
}

// Run rescues a disk. The report is there with an error too, as far as it came.
// When Run returns there is no VM and no temporary folder any more; a context that
// ended in between has been a power cut to the disk, after which it can be rescued
// as before.
func Run(ctx context.Context, cfg Config) (Report, error) {
	r := &rescue{Config: cfg, phase: untouched, report: NewReport(cfg.Disk)}
	r.attempt = r.inVM
	err := r.run(ctx)
	if err == nil {
		return r.report, nil
	}
	if ctx.Err() != nil {
		// What broke when the context ended is of no interest.
		err = r.corrected(fmt.Errorf("interrupted %s: %w", r.phase, context.Cause(ctx)))
	}
	return r.report.Failed(err), err
}

// Where a rescue can be interrupted, and what that means for the disk.
const (
	untouched  = "before the disk was touched"
	inTheVM    = "while the VM had the disk, which is a power cut to it and no harm: run rescue again"
	inReplay   = "while e2fsck -p replayed its journal, which begins anew the next time: run rescue again"
	betweenVMs = "between two VMs, when nothing had the disk: run rescue again"
	inCheck    = "in the check: the disk was mounted and unmounted, and nothing has it any more"
)

// NewReport is the report on a disk to which nothing has been done.
func NewReport(disk string) Report {
	return Report{Disk: disk, Recovered: RecoveredUnknown, KernelLog: []string{}}
}

// Failed is the report with why the rescue has failed.
func (r Report) Failed(err error) Report {
	r.Error = err.Error()
	if inUse, ok := errors.AsType[*holders.InUseError](err); ok {
		r.Holders = inUse.Holders
	}
	return r
}

func (r *rescue) run(ctx context.Context) (err error) {
	if err := r.step(ctx, "identify "+r.Disk, r.identify); err != nil {
		return err
	}
	defer r.close()
	if err := r.step(ctx, "make sure that nobody has it", func() (string, error) { return r.claim(ctx) }); err != nil {
		return err
	}
	if err := r.mount(ctx); err != nil {
		return err
	}
	return r.corrected(r.check(ctx))
}

// step tells of a step and takes it. What take returns is the step's detail.
func (r *rescue) step(ctx context.Context, name string, take func() (string, error)) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if r.Progress == nil {
		_, err := take()
		return err
	}
	r.Progress(Step{Name: name})
	began := time.Now()
	detail, err := take()
	r.Progress(Step{Name: name, Done: true, Detail: detail, Err: err, Took: time.Since(began)})
	return err
}

// identify opens the disk, and makes sure of all that is needed later on: what
// can fail is to fail before a VM runs.
func (r *rescue) identify() (_ string, err error) {
	if r.disk, err = holders.Open(r.Disk); err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			r.disk.Close()
		}
	}()
	if err := r.whatItHolds(); err != nil {
		return "", err
	}
	r.report.FSType = r.found.fstype
	if err := fsck.Available(r.found.fstype); err != nil {
		return "", fmt.Errorf("the check of %s afterwards: %w", r.found.fstype, err)
	}
	if r.report.Kernel, err = kernelVersion(r.Kernel); err != nil {
		return "", fmt.Errorf("the VM's kernel: %w", err)
	}
	if _, err := os.Stat(r.Image); err != nil {
		return "", fmt.Errorf("the VM's image: %w", err)
	}
	return r.found.fstype, nil
}

// whatItHolds identifies the open disk.
func (r *rescue) whatItHolds() (err error) {
	disk := r.disk.File()
	if r.found, err = identify(disk); err == nil {
		err = refuseMember(disk)
	}
	if err != nil {
		return fmt.Errorf("disk %s: %w", r.Disk, err)
	}
	return nil
}

// claim refuses a disk that others have, and keeps others from it. Looking comes
// first, for it knows names; then the claim, which is certain about what it covers;
// and then another look, for those who came in between.
func (r *rescue) claim(ctx context.Context) (string, error) {
	if _, err := r.look(ctx, nil); err != nil {
		return "", err
	}
	if err := r.disk.Claim(); err != nil {
		return "", err
	}
	if err := r.takeBack(); err != nil {
		return "", err
	}
	// Who had it before may have written it since.
	if err := r.whatItHolds(); err != nil {
		return "", err
	}
	return r.look(ctx, nil)
}

// look refuses a disk that others have. A process for which except is true may.
func (r *rescue) look(ctx context.Context, except func(pid int) bool) (string, error) {
	seen, err := r.disk.Settled(ctx, except)
	if err == nil {
		err = seen.Err(r.Disk)
	}
	if err != nil {
		return "", err
	}
	if r.report.Unseen = seen.Unseen; seen.Unseen > 0 {
		return fmt.Sprintf("as far as can be seen: %d processes belong to others and cannot be looked into; as root they can", seen.Unseen), nil
	}
	return "", nil
}

// Names in the VM, which has one volume.
const (
	sandboxID = "rescue"
	volumeID  = "rescue"
)

// stopLimit is for a VM's power-off after a mount that failed or was interrupted.
const stopLimit = 30 * time.Second

// killLimit is for QEMU's end when it is killed: only a disk that does not answer holds it up.
const killLimit = 30 * time.Second

// inVM boots the VM and has it mount and unmount the disk.
func (r *rescue) inVM(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "directvol-rescue-") // with mode 0700
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeoutCause(ctx, r.Timeout, fmt.Errorf("it took longer than %v (--timeout)", r.Timeout))
	defer cancel()
	said := new(console)
	var vm *sandbox.Sandbox
	var accelerator string
	err = r.step(ctx, "boot a VM with Linux "+r.report.Kernel, func() (_ string, err error) {
		vm, err = sandbox.Start(ctx, r.sandbox(dir, said, &accelerator))
		if err != nil {
			return "", explained(ctx, err)
		}
		return accelerator, nil
	})
	if err != nil {
		return err
	}
	// Whatever happens from here on, the VM is gone before its disk and its folder are let go.
	defer func() {
		if left := r.kill(ctx, vm); left != nil {
			err = errors.Join(err, left)
		}
		r.said = said.said()
		r.report.KernelLog = append(r.report.KernelLog, r.said...)
		r.recovered(err == nil)
	}()
	return r.orFull(r.mountOnce(ctx, vm))
}

// leastRoom is less than any recovery writes into the holes of a file.
const leastRoom = 64 << 10

// orFull adds to a VM's failure that the disk is a file with holes on a full
// filesystem. QEMU stops a guest that writes there, so what shows is a time limit.
func (r *rescue) orFull(err error) error {
	var file unix.Stat_t
	var host unix.Statfs_t
	fd := int(r.disk.File().Fd())
	if err == nil || unix.Fstat(fd, &file) != nil || file.Mode&unix.S_IFMT != unix.S_IFREG || file.Blocks*512 >= file.Size ||
		unix.Fstatfs(fd, &host) != nil || host.Blocks == 0 {
		return err
	}
	room := host.Bavail
	if os.Geteuid() == 0 {
		room = host.Bfree // root gets what is reserved too
	}
	if room*uint64(host.Bsize) >= leastRoom {
		return err
	}
	return fmt.Errorf("%w\nthe filesystem of this host that %s lies on is full: make room there and run rescue again", err, r.Disk)
}

// mountOnce gives the VM the disk, has it mount and unmount it, and powers off.
func (r *rescue) mountOnce(ctx context.Context, vm *sandbox.Sandbox) error {
	err := r.step(ctx, "mount it, which recovers its log", func() (string, error) {
		if err := r.attach(ctx, vm); err != nil {
			return "", err
		}
		r.report.Attempts++
		if _, err := vm.Mount(ctx, volumeID); err != nil {
			if ctx.Err() != nil {
				return "", explained(ctx, err)
			}
			return "", refusal(r.found.fstype, err)
		}
		return "", nil
	})
	if err != nil {
		r.powerOff(ctx, vm)
		return err
	}
	return r.step(ctx, "unmount it and power off", func() (string, error) {
		if err := vm.Unmount(ctx, volumeID); err != nil {
			return "", explained(ctx, err)
		}
		r.report.Mounted = true
		return "", explained(ctx, vm.Stop(ctx))
	})
}

// handOver lets go of the disk, for a VM that is to have it.
func (r *rescue) handOver() error {
	r.disk.Yield()
	r.unlock()
	return r.disk.Unlock()
}

// takeBack takes the disk back from a VM that has ended. What is held already stays.
func (r *rescue) takeBack() (err error) {
	if r.lock == nil {
		if r.lock, err = registry.Default().Lock(r.disk.File(), "directvol rescue"); err != nil {
			return err
		}
	}
	if err := r.disk.Take(); err != nil {
		return err
	}
	return r.disk.Lock()
}

// close lets go of the disk.
func (r *rescue) close() {
	r.disk.Close() // what was written is on the disk already
	r.unlock()
}

// unlock gives up the lock of the disk as a store.
func (r *rescue) unlock() {
	if r.lock != nil {
		r.lock.Release()
		r.lock = nil
	}
}

// attach hands the disk to the VM, which makes it its own when it gets it: package
// registry. Between the two there is a moment: who comes then, a sandbox, a QEMU or a
// mount, gets the disk, and ours is refused. A program that asks for no lock may come at
// any time; until the guest has mounted, nothing is written, so the look here still
// comes before any harm.
func (r *rescue) attach(ctx context.Context, vm *sandbox.Sandbox) error {
	if err := r.handOver(); err != nil {
		return err
	}
	r.phase = inTheVM
	err := vm.Attach(ctx, sandbox.Volume{ID: volumeID, Path: r.disk.Path(), FSType: r.found.fstype})
	if err != nil {
		return fmt.Errorf("disk %s: %w", r.Disk, explained(ctx, err))
	}
	_, err = r.look(ctx, isOurs)
	return err
}

// isOurs reports whether a process is this one, which holds the VM's store open, or a
// child of it, as the VM's are.
func isOurs(pid int) bool {
	if pid == os.Getpid() {
		return true
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	return parentIn(string(text)) == os.Getpid()
}

// powerOff ends a VM in order, so that its kernel's last words are heard. What does
// not end is killed by inVM.
func (r *rescue) powerOff(ctx context.Context, vm *sandbox.Sandbox) {
	if ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	_ = vm.Stop(ctx) // the mount's error is the one to tell
}

// explained adds why a context has ended, where that is what an error comes from.
func explained(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(cause, context.Canceled) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// kill ends a VM. Its disk is not let go of before: an error says that it still is.
func (r *rescue) kill(ctx context.Context, vm *sandbox.Sandbox) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	return vm.Kill(ctx)
}

func (r *rescue) sandbox(dir string, console *console, accelerator *string) sandbox.Config {
	cfg := qemu.Config{
		Dir:       dir,
		Kernel:    r.Kernel,
		Initrd:    r.Image,
		Append:    "loglevel=7", // of the kernel's words on the filesystem most are no warnings
		Bridges:   1,
		GuestCID:  freeCID(),
		Console:   console,
		Directvol: r.Directvol,
		Log:       quiet(),
	}
	return sandbox.Config{ID: sandboxID, Log: cfg.Log, Boot: func(ctx context.Context) (sandbox.Machine, error) {
		machine, err := qemu.StartMachine(ctx, cfg)
		if err != nil {
			return nil, err
		}
		*accelerator = machine.Accelerator().Name
		return machine, nil
	}}
}

// freeCID returns a guest CID that no other VM of this host is likely to have; the
// first three have meanings of their own (vsock(7)).
func freeCID() uint32 { return 3 + rand.Uint32N(1<<31) }

// quiet is a log that nobody reads: the steps say what happens.
func quiet() *logrus.Entry {
	log := logrus.New()
	log.SetLevel(logrus.PanicLevel)
	return logrus.NewEntry(log)
}
