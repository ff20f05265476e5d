package main

import (
	"context"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/rpc"
	"github.com/directvol/directvol/agent/sandbox"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/agent/transport"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/tests/guest/act"
)

// serveFaultyAgent is an agent without a table of volumes to measure: GetVolumeStats meets a nil pointer.
func serveFaultyAgent() error {
	log := logrus.NewEntry(logrus.New())
	storages := storage.NewTable(log, volume.NewTable(health.NewMonitor(log)), 3*time.Second, nil)
	agent := &rpc.Agent{Log: log, Version: "faulty", Sandbox: sandbox.New(log, storages), Storages: storages, Destroyed: func() {}}
	listener, err := transport.Listen(address.Address{Scheme: address.VSock, Port: act.FaultyAgentPort}, agent.Quick, &agent.Order, log)
	if err != nil {
		return err
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		return err
	}
	agent.Register(server)
	return server.Serve(context.Background(), listener)
}
