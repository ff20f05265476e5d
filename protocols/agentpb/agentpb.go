// Package agentpb contains the messages and services with which Kata Containers' clients call an
// agent in a guest: ttrpc, proto package "grpc". Everything except this file is generated from
// protocols/proto.
package agentpb

// Port is the vsock port on which the agent listens.
const Port = 1024

// APIVersion is the grpc_version in the answer to Health.Version: the version of the protocol, not
// of the agent.
const APIVersion = "0.0.1"
