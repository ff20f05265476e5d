// Package operation is the guest's side of tests/guest/remote. It serves the operations over any
// listener: vsock in a test guest, a unix socket in a unit test. It carries out the requests of
// everybody who connects, so it must only be in test images.
package operation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/directvol/directvol/tests/guest/remote"
)

// Serve answers connections until l is closed, and returns l's error. Operations that run then
// continue until they end.
func Serve(l net.Listener) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go serve(conn)
	}
}

// serve runs the one operation of a connection.
func serve(conn net.Conn) {
	defer conn.Close()
	lines := remote.NewLines(conn)
	var req remote.Request
	if err := lines.Receive(&req); err != nil {
		finish(lines, fmt.Errorf("receive the request: %w", err))
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { // ends with the connection at the latest
		defer cancel()
		var stop remote.Request
		_ = lines.Receive(&stop)
	}()
	run, ok := operations[req.Op]
	if !ok {
		finish(lines, fmt.Errorf("unknown operation %q", req.Op))
		return
	}
	finish(lines, run(ctx, req.Args, func(result any) error { return reply(lines, result) }))
}

func reply(lines *remote.Lines, result any) error {
	raw, err := json.Marshal(result)
	if err != nil {
		return err
	}
	return lines.Send(remote.Reply{Result: raw})
}

// finish sends the last line. It ignores an error, because then the client has gone away.
func finish(lines *remote.Lines, err error) {
	last := remote.Reply{Done: true}
	if err != nil {
		last.Error = describe(err)
	}
	_ = lines.Send(last)
}

// describe converts an error for the wire.
func describe(err error) *remote.Error {
	if e, ok := errors.AsType[*remote.Error](err); ok {
		return e
	}
	e := &remote.Error{Message: err.Error()}
	errors.As(err, &e.Errno)
	return e
}

// atBlock adds the index of the failed block to an error.
func atBlock(index uint64, err error) error {
	e := &remote.Error{Message: err.Error(), Index: &index, UnixMilliseconds: time.Now().UnixMilli()}
	errors.As(err, &e.Errno)
	return e
}
