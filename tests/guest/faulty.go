package main

import (
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/metrics"
	"github.com/directvol/directvol/agent/rpc"
	"github.com/directvol/directvol/agent/sandbox"
	"github.com/directvol/directvol/agent/server"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/tests/guest/remote"
)

// serveFaultyAgent serves an agent without a table of volumes: GetVolumeStats dereferences a nil
// pointer.
func serveFaultyAgent() error {
	log := logrus.NewEntry(logrus.New())
	storages := storage.NewTable(log, volume.NewTable(health.NewMonitor(log)), 3*time.Second, nil)
	counts := new(metrics.Calls)
	agent := &rpc.Agent{Log: log, Version: "faulty", Sandbox: sandbox.New(log, storages), Storages: storages, Destroyed: func() {}, Counts: counts}
	server := &server.Server{Log: log, Counts: counts}
	if err := server.Listen(address.Address{Scheme: address.VSock, Port: remote.FaultyAgentPort}, agent.Calls()); err != nil {
		return err
	}
	return server.Serve()
}
