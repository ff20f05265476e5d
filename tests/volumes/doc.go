// Package volumes holds the tests of the whole: a volume on its way through
// host, vsock, agent and kernel, in a VM. There is nothing in it but tests. They
// share one guest (TestMain); a guest of its own has only what ends one or needs
// another kernel command line, see alone_test.go.
package volumes
