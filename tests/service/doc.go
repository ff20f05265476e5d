// Package service tests an agent that is a service in its guest, and not PID 1. The agent ends in
// various ways, and a new agent takes over its volumes, and thaws those that are frozen; a panic in
// one call does not affect other calls. In `make test` the guest's init starts the service. `make
// test-long` boots a Debian whose systemd starts the service, with the units of deploy/. The
// package contains only tests.
package service
