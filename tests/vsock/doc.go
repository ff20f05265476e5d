// Package vsock tests vsock between a host and a guest: our own backend under load, and what
// remains after its death; a peer that is not the host; and the host's kernel in place of the
// backend. The tests share one guest, which is unusable after the backend's death. The package
// contains only tests.
package vsock
