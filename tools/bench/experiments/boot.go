package experiments

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/guestpath"
	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/rootfs"
	"github.com/directvol/directvol/rootfs/kernel"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

// bootAppend is the kernel command line of both guests. With earlyprintk the kernel's boot code
// (arch/x86/boot) has a console. Its first output marks the kernel's start, because the firmware
// prints nothing.
const bootAppend = "console=ttyS0 loglevel=1 panic=-1 earlyprintk=ttyS0 " + remote.FirstDisk + "=/dev/vda"

var boot = experiment{
	name: "boot to the first answer and to the first volume, the agent's and a bare init's",
	lines: []measure.Line{
		{Name: "boot_to_mount", Unit: "ms", Baseline: "boot_to_mount_by_hand", Goal: measure.AtMost(1.05),
			What: "from the kernel's first word on the console to the answer of an agent that is PID 1 that its first volume is mounted"},
		{Name: "boot_to_mount_by_hand", Unit: "ms",
			What: "the same with an init that loads the same modules, mounts the same disk and then answers an echo"},
		{Name: "boot_to_ready", Unit: "ms", Baseline: "boot_to_mount_by_hand",
			What: "the part of the agent's boot until it answers Check, for which it needs only vsock's modules"},
	},
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		l.endGuest() // otherwise two VMs would share the processors
		agent, err := l.bootImage(ctx, "agent", l.agentProgram())
		if err != nil {
			return measure.Session{}, err
		}
		echo, err := l.bootImage(ctx, "echo", filepath.Join(l.build.Dir, "test-guest"))
		if err != nil {
			return measure.Session{}, err
		}
		disk, err := vm.Scratch(ctx, l.memory, "ext4", diskBytes)
		if err != nil {
			return measure.Session{}, err
		}
		pair := []bootable{
			{agent, disk, agentpb.Port, []milestone{{"boot_to_ready", agentAnswers}, {"boot_to_mount", agentMounts}}},
			{echo, disk, remote.EchoPort, []milestone{{"boot_to_mount_by_hand", echoAnswers}}},
		}
		return measure.Session{Close: func(context.Context) error { return os.Remove(disk) }, Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			t := measure.Trial{}
			for _, guest := range pair {
				say(guest.reaches[len(guest.reaches)-1].row)
				if err := l.bootOnce(ctx, guest, t); err != nil {
					return nil, err
				}
			}
			slices.Reverse(pair) // swap the order for the next run
			return t, nil
		}}, nil
	},
}

// bootable is a guest with a disk, and its milestones in order.
type bootable struct {
	image, disk string
	port        uint32
	reaches     []milestone
}

// milestone is a row, and a check that returns nil when the guest has reached the milestone.
type milestone struct {
	row    string
	answer func(ctx context.Context, to address.Address, disk string) error
}

// firstDisk is the id of the boot disk.
const firstDisk = "first"

// bootImage makes an image with one program as its init, and with the modules of every guest.
func (l *Setup) bootImage(ctx context.Context, name, program string) (string, error) {
	out := filepath.Join(l.dir, name+".cpio")
	_, err := rootfs.Build(ctx, rootfs.Image{
		Kernel:   l.kernelSource(),
		Programs: []rootfs.Program{{Guest: "/init", Host: program}},
		Out:      out, KernelOut: l.bootKernel(),
	})
	return out, err
}

// kernelSource returns the source from which `make guest` gets the kernel.
func (l *Setup) kernelSource() kernel.Source {
	return kernel.Source{Cache: filepath.Join(l.build.Dir, "cache"), Progress: output.NewProgress(l.log)}
}

func (l *Setup) bootKernel() string { return filepath.Join(l.dir, "vmlinuz") }

// endLimit is the time limit for the end of a killed guest.
const endLimit = 30 * time.Second

// bootOnce boots a guest, and adds the times from the kernel's start to each milestone to a trial.
func (l *Setup) bootOnce(ctx context.Context, b bootable, t measure.Trial) (err error) {
	console := newFirstWord()
	log := logrus.New()
	log.SetOutput(l.log)
	guest, err := qemu.Start(ctx, qemu.Config{
		Dir: filepath.Join(l.dir, "boot"), Kernel: l.bootKernel(), Initrd: b.image, Append: bootAppend, GuestCID: 3 + rand.Uint32N(1<<31),
		BootDisks: []qemu.Disk{{ID: firstDisk, Path: b.disk}}, Console: console, Directvol: l.build.Directvol, Log: logrus.NewEntry(log),
	})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endLimit)
		defer cancel()
		err = errors.Join(err, guest.Kill(ctx))
	}()
	to, err := address.Parse(guest.GuestAddress(b.port))
	if err != nil {
		return err
	}
	disk, ok := guest.Disk(firstDisk)
	if !ok {
		return fmt.Errorf("QEMU has no disk %s", firstDisk)
	}
	began, err := console.await(ctx, guest.Done())
	if err != nil {
		return err
	}
	for _, m := range b.reaches {
		if err := m.await(ctx, to, disk.PCIPath, guest.Done()); err != nil {
			return fmt.Errorf("%s: %s: %w", b.image, m.row, err)
		}
		t[m.row] = append(t[m.row], milliseconds(time.Since(began)))
	}
	return nil
}

// await repeats the check until the guest has reached the milestone. disk is the boot disk's PCI
// path.
func (m milestone) await(ctx context.Context, to address.Address, disk string, ended <-chan struct{}) error {
	again := time.NewTicker(dialInterval)
	defer again.Stop()
	for {
		err := m.answer(ctx, to, disk)
		if err == nil {
			return nil
		}
		select {
		case <-again.C:
		case <-ended:
			return fmt.Errorf("it ended before it answered (%w)", err)
		case <-ctx.Done():
			return fmt.Errorf("it does not answer: %w (%w)", ctx.Err(), err)
		}
	}
}

func agentAnswers(ctx context.Context, to address.Address, _ string) error {
	client, err := agentclient.Dial(ctx, to, agentclient.Config{})
	if err != nil {
		return err
	}
	defer client.Close()
	return client.Check(ctx)
}

// agentMounts makes the agent mount the boot disk, as a host does.
func agentMounts(ctx context.Context, to address.Address, disk string) error {
	client, err := agentclient.Dial(ctx, to, agentclient.Config{})
	if err != nil {
		return err
	}
	defer client.Close()
	if err := client.CreateSandbox(ctx, &agentpb.CreateSandboxRequest{SandboxId: "boot"}); err != nil {
		return err
	}
	path, err := guestpath.Of(disk)
	if err != nil {
		return err
	}
	volume := &agentpb.Storage{Driver: "blk", Source: disk, Fstype: "ext4", MountPoint: path}
	return client.CreateContainer(ctx, &agentpb.CreateContainerRequest{ContainerId: "first", Storages: []*agentpb.Storage{volume}})
}

func echoAnswers(ctx context.Context, to address.Address, _ string) error {
	conn, err := to.Dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	return newEcho(ctx, conn).once()
}

// firstWord is a writer that records the time of the first write.
type firstWord struct {
	once sync.Once
	said chan time.Time
}

func newFirstWord() *firstWord { return &firstWord{said: make(chan time.Time, 1)} }

// Write never fails.
func (f *firstWord) Write(p []byte) (int, error) {
	f.once.Do(func() { f.said <- time.Now() })
	return len(p), nil
}

func (f *firstWord) await(ctx context.Context, ended <-chan struct{}) (time.Time, error) {
	select {
	case at := <-f.said:
		return at, nil
	case <-ended:
		return time.Time{}, errors.New("the VM ended before its kernel wrote a line")
	case <-ctx.Done():
		return time.Time{}, fmt.Errorf("the kernel writes nothing to the console: %w", ctx.Err())
	}
}
