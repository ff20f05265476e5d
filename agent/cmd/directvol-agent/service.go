package main

import (
	"fmt"
	"net"
	"os"

	"github.com/directvol/directvol/agent/state"
)

// newState returns the file in which a service keeps its state for the next agent. PID 1 keeps
// none, because no agent follows it.
func newState(set settings, asInit bool) (*state.File, error) {
	if asInit {
		return nil, nil
	}
	return state.Open(set.state)
}

// notifyReady tells systemd that the agent answers calls from now on (sd_notify(3), one datagram).
// Other init systems do not set NOTIFY_SOCKET.
func notifyReady() error {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return nil
	}
	conn, err := net.Dial("unixgram", socket) // "@" means the abstract namespace to both
	if err == nil {
		defer conn.Close()
		_, err = conn.Write([]byte("READY=1"))
	}
	if err != nil {
		return fmt.Errorf("tell systemd that the agent is ready: %w", err)
	}
	return nil
}
