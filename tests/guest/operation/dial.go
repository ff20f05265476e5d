package operation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/mdlayher/vsock"

	"github.com/directvol/directvol/tests/guest/remote"
)

// dialVsock makes a connection from the guest.
func dialVsock(ctx context.Context, args remote.DialVsock) (remote.Dialed, error) {
	if args.Await < 0 || args.Await > remote.MaxData {
		return remote.Dialed{}, fmt.Errorf("dial vsock: %d bytes awaited are outside 0 to %d", args.Await, remote.MaxData)
	}
	if args.CID == remote.OwnCID {
		own, err := vsock.ContextID()
		if err != nil {
			return remote.Dialed{}, err
		}
		args.CID = own
	}
	conn, err := vsock.DialContext(ctx, args.CID, args.Port, nil)
	if err != nil {
		return remote.Dialed{}, fmt.Errorf("dial vsock %d:%d: %w", args.CID, args.Port, err)
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	defer conn.Close()
	if _, err := conn.Write(args.Send); err != nil && !endedByPeer(err) {
		return remote.Dialed{}, err
	}
	data, err := io.ReadAll(io.LimitReader(conn, int64(args.Await)))
	if endedByPeer(err) {
		err = nil
	}
	return remote.Dialed{Data: data}, err
}

func endedByPeer(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
