package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/directvol/directvol/agent/guestinit"
	"github.com/directvol/directvol/protocols/modulelist"
	"github.com/directvol/directvol/tests/guest/remote"
)

// runAgent is the init of a guest whose agent is a service: it does PID 1's duties, and starts the
// agent again at once whenever it has ended. It returns only if it cannot start the agent.
func runAgent() error {
	guestinit.Reap()
	if err := errors.Join(guestinit.Mount(), guestinit.LoadModules(modulelist.Path)); err != nil {
		return err
	}
	if _, _, err := guestinit.Start("/test-guest", []string{"/test-guest", "serve"}, inheriting()); err != nil {
		return err
	}
	for {
		_, ended, err := guestinit.Start(remote.Agent, []string{remote.Agent}, inheriting())
		if err != nil {
			return err
		}
		status := <-ended
		fmt.Fprintf(os.Stderr, "test-guest: the agent has ended, status %#x\n", int(status))
	}
}
