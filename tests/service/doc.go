// Package service holds the tests of an agent that is a service in its guest, and not
// PID 1: it ends in every way, and a new one takes over its volumes; a panic in one call
// harms no other. In `make test` the guest's init starts the service. `make test-long`
// boots a Debian whose systemd does, with the units of deploy/. There is nothing in it
// but tests.
package service
