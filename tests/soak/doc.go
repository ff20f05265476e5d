// Package soak keeps healthy volumes of every type under full load for an hour while they grow, are
// trimmed and are frozen, and checks that no condition ever appears. The package contains only
// tests, which `make test-long` runs.
package soak
