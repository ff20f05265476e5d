package rpc

import (
	"context"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/agent/refusal"
	"github.com/directvol/directvol/protocols/service"
)

// codeOf are the codes that refusals travel as.
var codeOf = map[refusal.Kind]codes.Code{
	refusal.Internal:           codes.Internal,
	refusal.InvalidArgument:    codes.InvalidArgument,
	refusal.NotFound:           codes.NotFound,
	refusal.AlreadyExists:      codes.AlreadyExists,
	refusal.FailedPrecondition: codes.FailedPrecondition,
	refusal.OutOfRange:         codes.OutOfRange,
	refusal.DeadlineExceeded:   codes.DeadlineExceeded,
	refusal.Unimplemented:      codes.Unimplemented,
}

// method makes a ttrpc method of f, whose errors get codes.
func method[Q, R any, PQ service.Message[Q], PR service.Message[R]](f func(context.Context, PQ) (PR, error)) ttrpc.Method {
	return service.Method(func(ctx context.Context, request PQ) (PR, error) {
		response, err := f(ctx, request)
		if err == nil {
			return response, nil
		}
		code := codeOf[refusal.KindOf(err)]
		if code == codes.Internal && ctx.Err() != nil {
			code = codes.DeadlineExceeded
		}
		return nil, status.Error(code, err.Error())
	})
}
