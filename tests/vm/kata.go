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

// KataPort is the vsock port of a kata-agent started by StartKata. The agent under test has the
// usual port.
const KataPort = 1025

const (
	kataName   = "kata-agent"     // the program's name in the guest
	kataID     = "kata"           // the id of the disk with the program
	kataLimit  = 20 * time.Second // for its first answer, as a base for Limit
	kataRedial = 100 * time.Millisecond
)

// StartKata starts Kata Containers' own agent, from a program on the host, as an additional process
// of the guest, and returns its address for protocols/address. The agent runs until ctx ends, and
// may be started again then; a guest has one at a time. The agent gets its shared libraries from
// the host, on a disk that stays in the guest.
func (g *Guest) StartKata(ctx context.Context, program string) (string, error) {
	needs, err := sharedLibraries(program)
	if err != nil {
		return "", err
	}
	// All files go to the folder of the loader's path in the program, because the kernel looks for
	// the loader there.
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

// restartKata waits for the end of an agent that was told to end, and starts a new one.
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

// bring copies files into a folder of the guest, on a disk with its own id.
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
	// The disk is no volume of the agent under test, because a volume with a running program cannot
	// be unmounted.
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

// untilAnswers asks again and again, because no event tells the host when an agent listens.
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

// untilFails asks until nobody answers any more.
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

// check asks once. An agentclient would repeat the call until its limit.
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
