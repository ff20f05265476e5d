// Package typespb holds the messages that agentpb shares with the network side of a runtime: proto package "types". protocols/proto is the
// source; everything but this file is generated from it.
package typespb
