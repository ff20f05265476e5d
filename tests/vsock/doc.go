// Package vsock holds the tests of vsock between a host and a guest: our own backend under
// load, and what remains when it dies; a peer that is not the host; the host's kernel in
// place of the backend. They share one guest, which the backend's death makes useless.
// There is nothing in it but tests.
package vsock
