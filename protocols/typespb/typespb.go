// Package typespb contains the messages that agentpb shares with the network part of a runtime:
// proto package "types". Everything except this file is generated from protocols/proto.
package typespb
