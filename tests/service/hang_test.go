package service

import (
	"fmt"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// besideAHang returns two volumes that are mounted and healthy. The disk of the first one can hang
// at once.
func besideAHang(t *testing.T, g *vm.Guest, name string) (hangs, other *vm.Volume) {
	t.Helper()
	hangs, other = newVolume(t, g, name+"-hangs", "ext4"), newVolume(t, g, name+"-other", "xfs")
	for _, v := range []*vm.Volume{hangs, other} {
		vmtest.Must(t, v.Mount(vmtest.Limited(t)))
		_, err := v.LookedStats(vmtest.Limited(t))
		vmtest.Must(t, err)
	}
	vmtest.Must(t, hangs.Serve(vmtest.Limited(t)))
	return hangs, other
}

// An agent that starts while a disk hangs takes over that disk's volume without its disk, and
// answers for the others.
func TestAgentStartsBesideADiskThatHangs(t *testing.T) {
	g := shared.Guest(t)
	hangs, other := besideAHang(t, g, "starts")
	_, err := g.Remote.Signal(vmtest.Limited(t), remote.Agent, syscall.SIGSTOP) // so that no thread of it waits for the disk
	vmtest.Must(t, err)
	vmtest.Must(t, hangs.Hang(vmtest.Limited(t)))
	restart(t, daemon{g, remote.Agent}, syscall.SIGKILL)
	_, err = other.LookedStats(vmtest.Limited(t))
	vmtest.Must(t, err)
	vmtest.Must(t, other.Resize(vmtest.Limited(t), 512*miB))
	vmtest.Must(t, hangs.Answer())
	vmtest.Must(t, hangs.Heal(vmtest.Limited(t)))
	for _, v := range []*vm.Volume{hangs, other} {
		vmtest.Must(t, v.Touch(vmtest.Limited(t)))
		vmtest.Detach(t, v)
	}
}

// A killed agent does not end while one of its threads waits for a disk, and the next one starts
// when the disk answers. It has the volumes as before.
func TestAgentThatIsKilledBesideADiskThatHangsIsFollowedWhenItAnswers(t *testing.T) {
	g := shared.Guest(t)
	hangs, other := besideAHang(t, g, "killed")
	vmtest.Must(t, g.Remote.WriteFile(vmtest.Limited(t), hangs.GuestPath+"/dirty", make([]byte, 64*kiB)))
	vmtest.Must(t, hangs.Hang(vmtest.Limited(t)))
	if err := hangs.Unmount(vmtest.Limited(t)); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("unmount a disk that hangs\nwant DEADLINE_EXCEEDED\ngot  %v", err)
	}
	threads, err := g.Remote.Threads(vmtest.Limited(t), remote.Agent)
	vmtest.Must(t, err)
	if threads.Waiting() == 0 {
		t.Errorf("no thread of the agent waits for the disk, and nothing is shown: %v", threads)
	}
	killed, err := g.Remote.Signal(vmtest.Limited(t), remote.Agent, syscall.SIGKILL)
	vmtest.Must(t, err)
	answered := make(chan error, 1)
	ctx := vmtest.Limited(t)
	go func() { answered <- g.Agent().Check(ctx) }()
	for _, id := range killed {
		if _, err := g.Remote.ReadFile(vmtest.Limited(t), fmt.Sprintf("/proc/%d/stat", id)); err != nil {
			t.Errorf("the killed agent has ended before its disk answers: %v", err)
		}
	}
	select {
	case err := <-answered:
		t.Errorf("a call is answered before the disk answers, error %v", err)
	default:
	}
	vmtest.Must(t, hangs.Answer())
	vmtest.Must(t, hangs.Heal(vmtest.Limited(t)))
	vmtest.Must(t, <-answered)
	for _, v := range []*vm.Volume{hangs, other} {
		vmtest.Must(t, v.Mount(vmtest.Limited(t)))
		vmtest.Must(t, v.Touch(vmtest.Limited(t)))
		vmtest.Detach(t, v)
	}
}
