// Package agentlog tests the agent's log and its debug console. The kernel command line says where
// they are: on vsock ports or on the guest's console. Each test therefore boots its own guest. The
// package contains only tests.
package agentlog
