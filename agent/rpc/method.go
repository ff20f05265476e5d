package rpc

import (
	"context"
	"errors"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/protocols/service"
)

// codeOf maps kinds to status codes.
var codeOf = map[errkind.Kind]codes.Code{
	errkind.Internal:           codes.Internal,
	errkind.InvalidArgument:    codes.InvalidArgument,
	errkind.NotFound:           codes.NotFound,
	errkind.AlreadyExists:      codes.AlreadyExists,
	errkind.FailedPrecondition: codes.FailedPrecondition,
	errkind.OutOfRange:         codes.OutOfRange,
	errkind.DeadlineExceeded:   codes.DeadlineExceeded,
	errkind.Unimplemented:      codes.Unimplemented,
	errkind.Aborted:            codes.Aborted,
}

// method makes a ttrpc method of f, and gives f's errors status codes.
func method[Q, R any, PQ service.Message[Q], PR service.Message[R]](f func(context.Context, PQ) (PR, error)) ttrpc.Method {
	return service.Method(func(ctx context.Context, request PQ) (PR, error) {
		response, err := f(ctx, request)
		if err == nil {
			return response, nil
		}
		return nil, statusOf(ctx, err)
	})
}

// stream makes a ttrpc method with a stream of answers of f, and gives f's errors status codes. A
// stream whose caller has gone, or that a Shutdown ends, is cancelled.
func stream[Q, R any, PQ service.Message[Q], PR service.Message[R]](f func(context.Context, PQ, func(PR) error) error) ttrpc.Stream {
	return service.Stream(func(ctx context.Context, request PQ, send func(PR) error) error {
		err := f(ctx, request, send)
		switch {
		case err == nil:
			return nil
		case errors.Is(ctx.Err(), context.Canceled):
			return status.Error(codes.Canceled, err.Error())
		}
		return statusOf(ctx, err)
	})
}

// statusOf returns the status of an error of a call with a context.
func statusOf(ctx context.Context, err error) error {
	code := codeOf[errkind.Of(err)]
	if code == codes.Internal && ctx.Err() != nil {
		code = codes.DeadlineExceeded
	}
	return status.Error(code, err.Error())
}
