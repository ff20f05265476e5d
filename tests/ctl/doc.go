// Package ctl tests the program agent-ctl with real agents in a VM: our own, and Kata Containers'
// if KATA_AGENT names its program. It also compares the answers of both agents to calls and frames
// with a list, from which docs/kata-agent.md is made. The package contains only tests. They run the
// program that make has built.
package ctl
