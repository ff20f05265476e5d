package experiments

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
)

// echoing answers each message with the message as changed by change.
func echoing(t *testing.T, change func([]byte)) *echo {
	near, far := net.Pipe()
	t.Cleanup(func() { near.Close(); far.Close() })
	go func() {
		b := make([]byte, echoBytes)
		for {
			if _, err := io.ReadFull(far, b); err != nil {
				return
			}
			change(b)
			if _, err := far.Write(b); err != nil {
				return
			}
		}
	}()
	return newEcho(t.Context(), near)
}

func TestAnEchoThatChangesBytesIsAnError(t *testing.T) {
	if _, err := echoing(t, func([]byte) {}).several(3); err != nil {
		t.Errorf("a true echo: %v", err)
	}
	if err := echoing(t, func(b []byte) { b[63]++ }).once(); err == nil || !strings.Contains(err.Error(), "came back as") {
		t.Errorf("a false echo: got %v", err)
	}
}

func TestCallsAreMadeInTurnAndTheWarmUpIsNotCounted(t *testing.T) {
	var order strings.Builder
	samples, err := inTurn([]func() error{
		func() error { order.WriteByte('a'); return nil },
		func() error { order.WriteByte('b'); return nil },
	}, 3, func(int) {})
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Repeat("ab", warmUp+3); order.String() != want {
		t.Errorf("order\nwant %s\ngot  %s", want, order.String())
	}
	if len(samples) != 2 || len(samples[0]) != 3 || len(samples[1]) != 3 {
		t.Errorf("want 3 samples of each of 2\ngot  %v", samples)
	}
	cause := errors.New("no answer")
	if _, err := inTurn([]func() error{func() error { return cause }}, 3, func(int) {}); !errors.Is(err, cause) {
		t.Errorf("want %v\ngot  %v", cause, err)
	}
}

func TestTheFirstWordOnTheConsoleIsTheKernelsStart(t *testing.T) {
	f := newFirstWord()
	for _, word := range []string{"Probing", " EDD", "\n"} { // the second and third may not block
		if n, err := f.Write([]byte(word)); n != len(word) || err != nil {
			t.Fatal(n, err)
		}
	}
	if at, err := f.await(t.Context(), nil); err != nil || at.IsZero() {
		t.Errorf("want a time\ngot  %v, %v", at, err)
	}
	ended := make(chan struct{})
	close(ended)
	if _, err := newFirstWord().await(t.Context(), ended); err == nil {
		t.Error("a VM that ended without a word has a start")
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := newFirstWord().await(over, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("want context.Canceled\ngot  %v", err)
	}
}
