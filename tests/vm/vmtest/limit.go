package vmtest

import (
	"context"
	"testing"
	"time"

	"github.com/directvol/directvol/tests/vm"
)

// Bases for vm.Limit. They end hanging work, and say nothing about speed.
const (
	// CallLimit is for one call, or a few.
	CallLimit = 10 * time.Second
	// JobLimit is for many calls, for many bytes, and for a guest's boot.
	JobLimit = 2 * time.Minute
)

// Limited returns the context of one call or a few.
func Limited(t *testing.T) context.Context { return Within(t, CallLimit) }

// Within returns a context that ends with the test, or after vm.Limit(base).
func Within(t *testing.T, base time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), vm.Limit(base))
	t.Cleanup(cancel)
	return ctx
}

// Must ends the test at an error.
func Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
