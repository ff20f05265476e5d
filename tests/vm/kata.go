package vm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/tests/guest/remote"
)

// KataPort is the vsock port of a kata-agent that StartKata started: the agent
// that is under test has the usual one.
const KataPort = 1025

const (
	kataName   = "kata-agent"     // what the program is called in the guest
	kataID     = "kata"           // of the disk that brings it
	kataLimit  = 20 * time.Second // for its first answer, as a base for Limit
	kataRedial = 100 * time.Millisecond
)

// StartKata starts Kata Containers' own agent, a program on the host, as one
// more process of the guest, and returns where it answers, for
// protocols/address. It runs until ctx ends, and may be started again then; a
// guest has one at a time. It gets its shared libraries from the host, on a disk
// that stays in the guest.
func (g *Guest) StartKata(ctx context.Context, program string) (string, error) {
	needs, err := sharedLibraries(program)
	if err != nil {
		return "", err
	}
	// All lies where the program says that its loader is: the kernel looks there.
	dir := path.Dir(needs.loader)
	inGuest := path.Join(dir, kataName)
	_, err = g.Remote.Stat(ctx, inGuest)
	if errors.Is(err, fs.ErrNotExist) {
		err = g.bring(ctx, kataID, dir, append(needs.files, file{kataName, program}))
	}
	if err != nil {
		return "", fmt.Errorf("bring %s into the guest: %w", program, err)
	}
	to := g.VM().GuestAddress(KataPort)
	if err := g.restartKata(ctx, inGuest, dir, to); err != nil {
		return "", fmt.Errorf("start %s in the guest: %w", program, err)
	}
	return to, nil
}

// restartKata waits for the end of an agent that is told to end, and starts one.
func (g *Guest) restartKata(ctx context.Context, program, libraries, where string) error {
	to, err := address.Parse(where)
	if err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, Limit(kataLimit))
	defer cancel()
	if err := untilFails(waiting, func() error { return check(waiting, to) }); err != nil {
		return fmt.Errorf("another one still answers at %s: %w", to, err)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- g.runKata(ctx, program, "LD_LIBRARY_PATH="+libraries, fmt.Sprintf("KATA_AGENT_SERVER_ADDR=vsock://-1:%d", KataPort), "KATA_AGENT_LOG_LEVEL=warn")
	}()
	return untilAnswers(waiting, func() error { return check(waiting, to) }, ended)
}

// bring puts files into a folder of the guest, from a disk with an id of its own.
func (g *Guest) bring(ctx context.Context, id, dir string, files []file) error {
	image, err := imageOf(ctx, g.Dir, files)
	if err != nil {
		return err
	}
	if _, err := g.VM().AttachDisk(ctx, qemu.Disk{ID: id, Path: image, Serial: id, ReadOnly: true}); err != nil {
		return err
	}
	device, err := g.DeviceOf(ctx, id)
	if err != nil {
		return err
	}
	if err := g.Remote.Mkdir(ctx, dir, 0o755); err != nil {
		return err
	}
	// No volume of the agent under test: a program that runs could not be unmounted.
	return g.Remote.Mount(ctx, remote.Mount{Source: device, Target: dir, FSType: "ext4", Flags: unix.MS_RDONLY})
}

// runKata returns when the program has ended, which is always an error.
func (g *Guest) runKata(ctx context.Context, program string, env ...string) error {
	exit, err := g.Remote.Exec(ctx, remote.Command{Argv: []string{program}, Env: env})
	if err != nil {
		return err
	}
	return fmt.Errorf("it ended, with status %d %s:\n%s%s", exit.Code, exit.Signal, exit.Stdout, exit.Stderr)
}

// untilAnswers asks again and again: nothing tells the host when an agent
// listens.
func untilAnswers(ctx context.Context, ask func() error, ended <-chan error) error {
	again := time.NewTicker(kataRedial)
	defer again.Stop()
	for {
		err := ask()
		if err == nil {
			return nil
		}
		select {
		case ended := <-ended:
			return ended
		case <-ctx.Done():
			return fmt.Errorf("it does not answer: %w (%w)", ctx.Err(), err)
		case <-again.C:
		}
	}
}

// untilFails asks until there is nobody who answers.
func untilFails(ctx context.Context, ask func() error) error {
	again := time.NewTicker(kataRedial)
	defer again.Stop()
	for ask() == nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-again.C:
		}
	}
	return ctx.Err()
}

// check asks once. An agentclient would ask again until its limit.
func check(ctx context.Context, to address.Address) error {
	conn, err := to.Dial(ctx)
	if err != nil {
		return err
	}
	client := ttrpc.NewClient(conn)
	defer client.Close()
	response, err := service.Call[agentpb.HealthCheckResponse](ctx, client, agentpb.HealthServiceName, "Check", &agentpb.CheckRequest{})
	if err == nil && response.Status != agentpb.HealthCheckResponse_SERVING {
		err = fmt.Errorf("its status is %v", response.Status)
	}
	return err
}
