package main

import (
	"fmt"
	"net"
	"os"

	"github.com/directvol/directvol/agent/state"
)

// newState returns where a service keeps what the one after it has to know. PID 1
// keeps nothing: no agent comes after it.
func newState(set settings, asInit bool) (*state.File, error) {
	if asInit {
		return nil, nil
	}
	return state.Open(set.state)
}

// notifyReady tells systemd that calls are answered from now on (sd_notify(3),
// which is one datagram). Another init has asked for nothing.
func notifyReady() error {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return nil
	}
	conn, err := net.Dial("unixgram", socket) // "@" is the abstract namespace to both
	if err == nil {
		defer conn.Close()
		_, err = conn.Write([]byte("READY=1"))
	}
	if err != nil {
		return fmt.Errorf("tell systemd that the agent is ready: %w", err)
	}
	return nil
}
