// Package agentpb holds the messages and services that Kata Containers' clients speak to an agent in a guest: ttrpc, proto package "grpc".
// protocols/proto is the source; everything but this file is generated from it.
package agentpb

// Port is the vsock port the agent listens on.
const Port = 1024

// APIVersion is what Health.Version answers as grpc_version: the version of the wire, not of the agent.
const APIVersion = "0.0.1"
