// Package vmtest has what packages of VM tests share in addition to tests/vm: time limits, guests
// that end with their test, one guest for all tests of a package, and a guest's mounts. Its
// functions end the test on a failure. The demo and the bench are no tests and use only tests/vm.
package vmtest
