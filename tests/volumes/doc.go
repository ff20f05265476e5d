// Package volumes tests the whole system in a VM: a volume on its way through host, vsock, agent
// and kernel. The package contains only tests. The tests share one guest (TestMain). A test boots
// its own guest only if it ends the guest or needs another kernel command line, see alone_test.go.
package volumes
