// Package ctl holds the tests of the program agent-ctl in front of real agents,
// in a VM: ours, and Kata Containers' own where KATA_AGENT names it. Beside that
// it compares what both answer to calls and frames with a list, which
// docs/kata-agent.md is made from. There is nothing in it but tests. They run the
// program that make has built.
package ctl
