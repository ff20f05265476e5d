// Package vmtest is what packages of VM tests share beside tests/vm: limits for what
// hangs, guests that end with their test, one guest for all tests of a package, and what
// a guest's kernel has mounted. Failures end the test; the demo and the bench, which are
// no tests, use tests/vm alone.
package vmtest
