package rpc

import (
	"context"
	"runtime/debug"

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

// method wraps f so that its errors have codes and its calls are logged.
func method[Q, R any, PQ service.Message[Q], PR service.Message[R]](a *Agent, name string, f func(context.Context, PQ) (PR, error)) ttrpc.Method {
	return service.Method(func(ctx context.Context, request PQ) (response PR, err error) {
		if !a.calls.TryRLock() {
			return nil, status.Errorf(codes.Unavailable, "%s: the agent is ending; nothing was done: call again", name)
		}
		defer a.calls.RUnlock()
		defer func() {
			if p := recover(); p != nil { // ttrpc does not, and PID 1 must not die
				a.panicked(name, p)
				response, err = nil, status.Errorf(codes.Internal, "%s: the agent has a bug, its log says more", name)
			}
		}()
		response, err = inOrder(ctx, a, request, f)
		if err == nil {
			a.Log.Debug(name)
			return response, nil
		}
		code := codeOf[refusal.KindOf(err)]
		if code == codes.Internal && ctx.Err() != nil {
			code = codes.DeadlineExceeded
		}
		a.Log.WithField("code", code).Warnf("%s: %v", name, err)
		return nil, status.Error(code, err.Error())
	})
}

// inOrder makes a call when the guest is ready, and those before it have joined.
func inOrder[Q, R any](ctx context.Context, a *Agent, request Q, f func(context.Context, Q) (R, error)) (response R, err error) {
	call, err := a.Order.Claim(ctx)
	if err != nil {
		return response, err
	}
	defer call.End()
	if err = a.ready(ctx); err != nil {
		return response, err
	}
	if ctx, err = call.Begin(ctx); err != nil {
		return response, err
	}
	return f(ctx, request)
}

// panicked logs a panic. It is deferred, so the stack is the one that panicked.
func (a *Agent) panicked(method string, p any) {
	a.Log.Errorf("%s: panic: %v\n%s", method, p, debug.Stack())
}

// Drain waits for the calls that are under way, until ctx ends. Those that come
// from now on are refused: it is for the agent's end.
func (a *Agent) Drain(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		a.calls.Lock()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// isReady reports whether ready would not wait.
func (a *Agent) isReady() bool {
	if a.Ready == nil {
		return true
	}
	select {
	case <-a.Ready:
		return true
	default:
		return false
	}
}

// ready waits for Ready until ctx ends.
func (a *Agent) ready(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return refusal.New(refusal.DeadlineExceeded, "its time was over when it arrived: call again with more: %w", err)
	}
	if a.Ready == nil {
		return nil
	}
	select {
	case <-a.Ready:
		return nil
	case <-ctx.Done():
		return refusal.New(refusal.DeadlineExceeded, "the guest is still loading its modules: %w", ctx.Err())
	}
}
