package vm

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/directvol/directvol/tests/guest/remote"
)

var kept atomic.Int64

// KeepMounts has a process of the guest keep all mounts, as they are now, in a mount
// namespace of its own, until end is called or ctx ends. The namespace's end goes on in the
// guest's kernel behind end.
func (g *Guest) KeepMounts(ctx context.Context) (end func(), err error) {
	ready := fmt.Sprintf("/run/kept-%d", kept.Add(1))
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		exit, err := g.Remote.Exec(ctx, remote.Command{Argv: []string{"/test-guest", remote.OtherNamespace, ready}})
		if err == nil {
			err = fmt.Errorf("it has ended: %+v", exit)
		}
		ended <- err
	}()
	err = Again(ctx, func() (bool, error) {
		select {
		case err := <-ended:
			ended <- err
			return false, err
		default:
		}
		_, err := g.Remote.Stat(ctx, ready)
		return err == nil, nil // it is not there yet
	})
	end = func() { cancel(); <-ended }
	if err != nil {
		end()
		return nil, fmt.Errorf("keep the mounts in another namespace: %w", err)
	}
	return end, nil
}
