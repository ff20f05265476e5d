// Package agentlog holds the tests of the agent's log and of its debug console: both are
// where the kernel's command line says, on vsock ports or on the guest's console. Each
// test boots a guest of its own, as its subject is what the kernel is told. There is
// nothing in it but tests.
package agentlog
