// Package ctl tests the program agent-ctl with real agents in a VM: our own, and Kata Containers'
// if KATA_AGENT names its program. Other tests here send calls and frames to both agents, and
// compare the answers' codes and fields with lists; docs/kata-agent.md is made from these lists.
// The package contains only tests. They run the program that make has built.
package ctl
