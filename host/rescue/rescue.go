// Package rescue repairs a volume that, after a power failure, its sandbox's kernel refuses to
// mount. A temporary VM with a newer kernel mounts the volume once, which recovers its log, and
// unmounts it. Then a read-only check on the host looks for remaining damage.
//
// The main case is an xfs that was grown, if the power failed before its primary superblock had the
// new size. Linux 6.1 then fails to recover the log ("structure needs cleaning"), at least at the
// first attempt. Newer kernels recover it, and nothing is lost. xfs_repair -L would discard the
// log, and with it files that fsync had acknowledged.
//
// Newer kernels adopt the new size while they recover the log, if the size comes in the log before
// changes beyond the old end. There are two exceptions. After more than one growth, the log
// contains only the superblock of the last growth, and changes to the first growth's groups come
// before it. And a directory that was in the log before the growth, but was written out after it,
// refers to groups that recovery does not know yet. Linux 7.3 refuses such volumes as 6.1 does, at
// every attempt. If the superblock of an old group proves that a growth is in the log
// (provenGrowth), the rescue then writes into the primary superblock a size with which recovery can
// begin, and mounts the volume again.
//
// A grown ext4 may also be refused by every kernel (see mountReplayed). Then the rescue runs e2fsck
// -p on this host, which replays the journal, and mounts the volume again. Apart from the VM's
// mounts, the rescue writes nothing else.
//
// The rescue refuses a disk that is in use on this host (package holders).
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

// Config says which disk to rescue, and with what.
type Config struct {
	// Disk is the path of an image file or a block device that contains xfs or ext4.
	Disk string
	// Kernel and Image are the paths of the VM's kernel and image.
	Kernel, Image string
	// Directvol is the path of this program, for hosts without /dev/vhost-vsock; see qemu.Config.
	Directvol string
	// Timeout limits the life of each VM, from its start to its power-off. CheckTimeout limits each
	// run of e2fsck or xfs_repair; 0 means a limit that depends on the disk's size.
	Timeout, CheckTimeout time.Duration
	// Progress is called before and after each step. It may be nil.
	Progress func(Step)
}

// rescue is a rescue in progress.
type rescue struct {
	Config
	disk   *holders.Disk
	lock   *registry.Lock // of the disk as a store; nil while a VM has the disk
	found  found
	phase  string
	said   []string // messages of the last VM's kernel
	tried  string   // what was tried with the superblock or journal, for the error
	report Report
	// attempt makes a VM mount the disk. It is inVM, except in tests.
	attempt func(context.Context) error
}

// Run rescues a disk. After an error the Report is filled in up to the failed step. When Run
// returns, its VM and its temporary directory are gone. If the context ends during the rescue, that
// is a power cut to the disk, and the disk can be rescued again.
func Run(ctx context.Context, cfg Config) (Report, error) {
	r := &rescue{Config: cfg, phase: untouched, report: NewReport(cfg.Disk)}
	r.attempt = r.inVM
	err := r.run(ctx)
	if err == nil {
		return r.report, nil
	}
	if ctx.Err() != nil {
		// The error that the end of the context caused is not of interest.
		err = r.corrected(fmt.Errorf("interrupted %s: %w", r.phase, context.Cause(ctx)))
	}
	return r.report.Failed(err), err
}

// The phases in which a rescue can be interrupted, with the consequences for the disk.
const (
	untouched  = "before the disk was touched"
	inTheVM    = "while the VM had the disk, which is a power cut to it and no harm: run rescue again"
	inReplay   = "while e2fsck -p replayed its journal, which is repeated the next time: run rescue again"
	betweenVMs = "between two VMs, when none used the disk: run rescue again"
	inCheck    = "in the check: the disk was mounted and unmounted, and no VM uses it any more"
)

func (r *rescue) run(ctx context.Context) (err error) {
	if err := r.step(ctx, "identify "+r.Disk, r.identify); err != nil {
		return err
	}
	defer r.close()
	if err := r.step(ctx, "make sure that nothing uses it", func() (string, error) { return r.claim(ctx) }); err != nil {
		return err
	}
	if err := r.mount(ctx); err != nil {
		return err
	}
	return r.corrected(r.check(ctx))
}

// step reports a step to Progress and runs it. take returns the step's detail.
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

// identify opens the disk and checks all later requirements, so that a missing one is noticed
// before a VM starts.
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

// whatItHolds identifies the filesystem on the open disk.
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

// Names in the VM, which has a single volume.
const (
	sandboxID = "rescue"
	volumeID  = "rescue"
)

// stopLimit limits a VM's power-off after a mount that failed or was interrupted.
const stopLimit = 30 * time.Second

// killLimit limits the wait for QEMU's end after a kill. Only a disk that does not answer can delay
// that end.
const killLimit = 30 * time.Second

// inVM boots the VM and makes it mount and unmount the disk.
func (r *rescue) inVM(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "directvol-rescue-") // made with mode 0700
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
	// In every case the VM must be gone before its disk and its directory are released.
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

// leastRoom is less than any recovery writes into the holes of a sparse file.
const leastRoom = 64 << 10

// orFull adds to a VM's failure that the disk is a sparse file on a full filesystem. QEMU pauses a
// guest that writes there, so the failure itself is only a timeout.
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
		room = host.Bfree // root may also use the reserved blocks
	}
	if room*uint64(host.Bsize) >= leastRoom {
		return err
	}
	return fmt.Errorf("%w\nthe filesystem of this host that %s lies on is full: make room there and run rescue again", err, r.Disk)
}

// mountOnce gives the VM the disk, makes it mount and unmount the disk, and powers the VM off.
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

// attach hands the disk to the VM, which claims it on attach (package registry). In between there
// is a gap: if a sandbox, a QEMU or a mount takes the disk in the gap, the VM is refused. A program
// that does not ask for a lock may come at any time. Nothing is written until the guest has mounted
// the disk, so the search for users here still comes before any harm.
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

// powerOff shuts a VM down cleanly, so that its kernel's last messages arrive. inVM kills a VM that
// does not end.
func (r *rescue) powerOff(ctx context.Context, vm interface{ Stop(context.Context) error }) {
	if ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	_ = vm.Stop(ctx) // the mount's error is the important one
}

// explained adds the reason why a context has ended to an error that this end caused.
func explained(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(cause, context.Canceled) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// kill kills a VM and waits for its end. An error means that the VM still has its disk.
func (r *rescue) kill(ctx context.Context, vm interface{ Kill(context.Context) error }) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	return vm.Kill(ctx)
}

func (r *rescue) sandbox(dir string, console *console, accelerator *string) sandbox.Config {
	cfg := qemu.Config{
		Dir:       dir,
		Kernel:    r.Kernel,
		Initrd:    r.Image,
		Append:    "loglevel=7", // most kernel messages about the filesystem are not warnings
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

// freeCID returns a random guest CID, which no other VM of this host is likely to have. The first
// three CIDs are reserved (vsock(7)).
func freeCID() uint32 { return 3 + rand.Uint32N(1<<31) }

// quiet returns a log that discards everything, because the steps report enough.
func quiet() *logrus.Entry {
	log := logrus.New()
	log.SetLevel(logrus.PanicLevel)
	return logrus.NewEntry(log)
}
