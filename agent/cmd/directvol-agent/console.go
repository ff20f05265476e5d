package main

import (
	"context"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/debugconsole"
	"github.com/directvol/directvol/agent/transport"
	"github.com/directvol/directvol/protocols/address"
)

// serialConsole is the console from the kernel's command line (console=).
const serialConsole = "/dev/console"

// openDebugConsole gives the host a shell until ctx ends, if the settings ask for one. The shell is
// on the console, or on a vsock port if the settings name one, as with Kata, whose runtime sets
// both options.
func openDebugConsole(ctx context.Context, set settings, asInit bool, log *logrus.Entry) {
	console := &debugconsole.Console{Log: log}
	serve := func() error { return console.RunOn(ctx, serialConsole) }
	switch {
	case !set.console && set.consolePort != 0:
		log.Warn("debug console: -debug-console-vport alone opens none: add -debug-console (agent.debug_console)")
		return
	case !set.console:
		return
	case set.consolePort != 0:
		l, err := transport.ListenStreams(address.Address{Scheme: address.VSock, Port: set.consolePort}, debugconsole.MaxSessions, log)
		if err != nil {
			log.Errorf("debug console: %v", err)
			return
		}
		log.WithField("address", l.Addr()).Warn("debug console: each connection of the host gets a shell")
		serve = func() error { return console.Serve(ctx, l) }
	case !asInit:
		log.Warn("debug console: only PID 1 has the console: add -debug-console-vport")
		return
	}
	go func() {
		if err := serve(); ctx.Err() == nil {
			log.Errorf("debug console: %v", err)
		}
	}()
}
