// Package volumepb contains the messages and services of directvol's agent that Kata's agent does
// not have: ttrpc, proto package "directvol.v1". Everything except this file is generated from
// protocols/proto.
package volumepb
