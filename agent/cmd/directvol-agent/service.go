package main

import (
	"fmt"
	"net"
	"os"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/state"
	"github.com/directvol/directvol/agent/volume"
)

// newState returns the file in which a service keeps its state for the next agent. PID 1 keeps
// none, because no agent follows it.
func newState(set settings, asInit bool) (*state.File, error) {
	if asInit {
		return nil, nil
	}
	return state.Open(set.state)
}

// keepLeases makes a service save which volumes it has frozen, in a file beside its state, and
// thaws those that an earlier agent has left frozen. The caller calls end when the agent ends.
func keepLeases(of *state.File, volumes *volume.Table, log *logrus.Entry) (end func()) {
	if of == nil {
		return volumes.EndLeases
	}
	file, err := state.Open(of.Path() + ".leases")
	if err == nil {
		err = volumes.KeepLeases(file)
	}
	if err != nil {
		log.Error(err)
	}
	return func() {
		volumes.EndLeases()
		_ = file.Close()
	}
}

// notifyReady tells systemd that the agent answers calls from now on (sd_notify(3), one datagram).
// Other init systems do not set NOTIFY_SOCKET.
func notifyReady() error {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: socket, Net: "unixgram"}) // "@" means the abstract namespace to both
	if err == nil {
		defer conn.Close()
		_, err = conn.Write([]byte("READY=1"))
	}
	if err != nil {
		return fmt.Errorf("tell systemd that the agent is ready: %w", err)
	}
	return nil
}
