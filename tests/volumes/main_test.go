package volumes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/directvol/directvol/tests/vm"
)

const (
	// callLimit ends what hangs, as a base for vm.Limit.
	callLimit = 10 * time.Second
	// jobLimit is the same for what takes many calls.
	jobLimit = time.Minute
)

// booted is the shared guest, nil until the first test asks for it.
var booted *vm.Guest

var shared = sync.OnceValues(func() (_ *vm.Guest, err error) {
	booted, err = vm.Boot(context.Background(), vm.Options{})
	return booted, err
})

func TestMain(m *testing.M) {
	if _, err := vm.FindBuild(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if booted != nil {
		if err := powerOff(booted); err != nil {
			fmt.Fprintln(os.Stderr, "FAIL: the shared guest did not end in order:", err)
			booted.Explain(os.Stderr)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// powerOff is a test too, of how every guest ends: Stop accepts nothing but a
// SHUTDOWN by the guest and QEMU's exit 0.
func powerOff(g *vm.Guest) error {
	ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
	defer cancel()
	err := g.Stop(ctx)
	g.Kill()
	return errors.Join(err, g.Close())
}

// guest returns the guest that all tests share.
func guest(t *testing.T) *vm.Guest {
	t.Helper()
	g, err := shared()
	must(t, err)
	explain(t, g)
	return g
}

// explain prints what a guest has to say when the test has failed.
func explain(t *testing.T, g *vm.Guest) {
	t.Cleanup(func() {
		if t.Failed() {
			g.Explain(t.Output())
		}
	})
}

// limited returns the context of one call or a few.
func limited(t *testing.T) context.Context { return within(t, callLimit) }

// within returns a context that ends with the test, or after base as vm.Limit has it.
func within(t *testing.T, base time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), vm.Limit(base))
	t.Cleanup(cancel)
	return ctx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
