package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/rootfs"
	"github.com/directvol/directvol/rootfs/kernel"
	"github.com/directvol/directvol/tests/guest/act"
)

// bootAppend is both guests' kernel command line. With earlyprintk the kernel's boot code (arch/x86/boot) has a console, and its first word
// there is the kernel's start: the firmware says nothing.
const bootAppend = "console=ttyS0 loglevel=1 panic=-1 earlyprintk=ttyS0"

var boot = experiment{
	name: "boot to the first answer, the agent's and the echo's",
	lines: []line{
		{name: "boot_to_ready", unit: "ms", baseline: "boot_to_echo", goal: atMost(1.05),
			what: "from the kernel's first word on the console to the answer of an agent that is PID 1"},
		{name: "boot_to_echo", unit: "ms", what: "the same with an init that loads the same modules and is nothing but the echo"},
	},
	open: func(ctx context.Context, l *lab, _ int) (session, error) {
		l.endGuest() // two VMs would share the processors
		agent, err := l.bootImage(ctx, "agent", l.agentProgram())
		if err != nil {
			return session{}, err
		}
		echo, err := l.bootImage(ctx, "echo", filepath.Join(l.build.Dir, "test-guest"))
		if err != nil {
			return session{}, err
		}
		pair := []bootable{
			{"boot_to_ready", agent, agentpb.Port, agentAnswers},
			{"boot_to_echo", echo, act.EchoPort, echoAnswers},
		}
		return session{run: func(ctx context.Context, say func(string)) (trial, error) {
			t := trial{}
			for _, guest := range pair {
				say(guest.row)
				took, err := l.bootOnce(ctx, guest)
				if err != nil {
					return nil, err
				}
				t[guest.row] = []float64{milliseconds(took)}
			}
			slices.Reverse(pair) // the other one first, the next time
			return t, nil
		}}, nil
	},
}

// bootable is a guest, and what shows that it is there.
type bootable struct {
	row, image string
	port       uint32
	answer     func(context.Context, address.Address) error
}

// bootImage makes an image with one program, which is its init, and the modules that every guest has.
func (l *lab) bootImage(ctx context.Context, name, program string) (string, error) {
	out := filepath.Join(l.dir, name+".cpio")
	_, err := rootfs.Build(ctx, rootfs.Image{
		Kernel:   l.kernelSource(),
		Programs: []rootfs.Program{{Guest: "/init", Host: program}},
		Out:      out, KernelOut: l.bootKernel(),
	})
	return out, err
}

// kernelSource is where make guest has the kernel from.
func (l *lab) kernelSource() kernel.Source {
	return kernel.Source{Cache: filepath.Join(l.build.Dir, filepath.Base(kernel.DefaultCache)), Progress: l.log}
}

func (l *lab) bootKernel() string { return filepath.Join(l.dir, "vmlinuz") }

// bootOnce boots a guest and returns how long it took from the kernel's start to the first answer.
func (l *lab) bootOnce(ctx context.Context, b bootable) (time.Duration, error) {
	console := newFirstWord()
	log := logrus.New()
	log.SetOutput(l.log)
	guest, err := qemu.Start(ctx, qemu.Config{
		Dir: filepath.Join(l.dir, "boot"), Kernel: l.bootKernel(), Initrd: b.image, Append: bootAppend, GuestCID: 3 + rand.Uint32N(1<<31),
		Console: console, Directvol: l.build.Directvol, Log: logrus.NewEntry(log),
	})
	if err != nil {
		return 0, err
	}
	defer guest.Kill()
	to, err := address.Parse(guest.GuestAddress(b.port))
	if err != nil {
		return 0, err
	}
	began, err := console.await(ctx, guest.Done())
	if err != nil {
		return 0, err
	}
	again := time.NewTicker(dialInterval)
	defer again.Stop()
	for {
		err := b.answer(ctx, to)
		if err == nil {
			return time.Since(began), nil
		}
		select {
		case <-again.C:
		case <-guest.Done():
			return 0, fmt.Errorf("%s ended before it answered (%w)", b.image, err)
		case <-ctx.Done():
			return 0, fmt.Errorf("%s does not answer: %w (%w)", b.image, ctx.Err(), err)
		}
	}
}

func agentAnswers(ctx context.Context, to address.Address) error {
	client, err := agentclient.Dial(ctx, to, agentclient.Config{})
	if err != nil {
		return err
	}
	defer client.Close()
	return client.Check(ctx)
}

func echoAnswers(ctx context.Context, to address.Address) error {
	conn, err := to.Dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	return newEcho(ctx, conn).once()
}

// firstWord takes the time when something is first written to it.
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
		return time.Time{}, errors.New("the VM ended before its kernel said a word")
	case <-ctx.Done():
		return time.Time{}, fmt.Errorf("the kernel says nothing: %w", ctx.Err())
	}
}
