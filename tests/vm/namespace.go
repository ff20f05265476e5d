package vm

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/directvol/directvol/tests/guest/remote"
)

var kept atomic.Int64

// KeepMounts makes a process of the guest keep all present mounts in a separate mount namespace,
// until end is called or ctx ends. The guest's kernel may still be removing the namespace after end
// has returned.
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
		return err == nil, nil // the file is not there yet
	})
	end = func() { cancel(); <-ended }
	if err != nil {
		end()
		return nil, fmt.Errorf("keep the mounts in another namespace: %w", err)
	}
	return end, nil
}
