// Package volumepb holds the messages and services that directvol's agent has beyond Kata's: ttrpc, proto package "directvol.v1".
// protocols/proto is the source; everything but this file is generated from it.
package volumepb
