// Package ctl holds the tests of the program agent-ctl in front of real agents,
// in a VM: ours, and Kata Containers' own where KATA_AGENT names it. There is
// nothing in it but tests. They run the program that make has built.
package ctl
