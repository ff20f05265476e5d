// Package ways holds the tests of the ways into a guest: vsock through our own
// backend, under load and when it dies, through the host's kernel, and from a
// peer that is not the host. There is nothing in it but tests. They share one
// guest (TestMain), whose image holds a module more than the usual one; the one
// that takes the guest's vsock away leaves none to share, so it is the last.
package ways
