// Package ways holds the tests of the ways into a guest: vsock through our own
// backend, under load and when it dies, through the host's kernel, and from a
// peer that is not the host; and of the log and the debug console, which have
// ways of their own. There is nothing in it but tests. They share one guest
// (TestMain), whose image holds a module more than the usual one. Those whose
// subject is what the kernel is told boot their own, before there is one to
// share; the one that takes the guest's vsock away leaves none, so it is the last.
package ways
