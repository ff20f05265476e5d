// Package service adds types to ttrpc's untyped methods: a server registers functions on messages,
// a client gets the response's type back, and a table of method descriptions lets a program handle
// a service generically.
package service

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// maxErrorLength limits the message of an error on the wire, in bytes.
const maxErrorLength = 4 << 10

// Message is a pointer type *T that implements proto.Message.
type Message[T any] interface {
	*T
	proto.Message
}

// Method makes f a unary ttrpc method, for a ttrpc.ServiceDesc. A payload that cannot be decoded is
// answered with codes.InvalidArgument without calling f. The error of f keeps its gRPC code. Its
// text is made valid UTF-8 of limited length, because ttrpc drops the whole connection if a status
// cannot be encoded.
func Method[Q, R any, PQ Message[Q], PR Message[R]](f func(context.Context, PQ) (PR, error)) ttrpc.Method {
	return func(ctx context.Context, unmarshal func(any) error) (any, error) {
		request := PQ(new(Q))
		if err := unmarshal(request); err != nil {
			return nil, status.Error(codes.InvalidArgument, wireText(status.Convert(err).Message()))
		}
		response, err := f(ctx, request)
		if err != nil {
			return nil, wireError(err)
		}
		return response, nil
	}
}

// Call makes a unary call and returns its response. Its errors always have a gRPC code, even if
// ttrpc's do not: codes.DeadlineExceeded or codes.Canceled if the context ended, codes.Unavailable
// if the connection ended, codes.Internal if the answer cannot be decoded.
//
//	stats, err := service.Call[agentpb.VolumeStatsResponse](ctx, client, agentpb.AgentServiceName, "GetVolumeStats", request)
func Call[R any, PR Message[R]](ctx context.Context, client *ttrpc.Client, service, method string, request proto.Message) (PR, error) {
	response := PR(new(R))
	err := client.Call(ctx, service, method, request, response)
	if err == nil {
		return response, nil
	}
	return nil, callError(err)
}

// callError adds the missing code to an error of ttrpc's client.
func callError(err error) error {
	var network *net.OpError
	switch _, ok := status.FromError(err); {
	case ok:
		return err
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return status.FromContextError(err).Err()
	case errors.Is(err, ttrpc.ErrClosed), errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &network):
		return status.Error(codes.Unavailable, err.Error())
	default:
		return status.Error(codes.Internal, wireText("malformed answer: "+err.Error()))
	}
}

// wireError returns err in a form that can be sent.
func wireError(err error) error {
	st, ok := status.FromError(err)
	if !ok && wireText(err.Error()) == err.Error() {
		return err // ttrpc determines the codes of the standard library's errors
	}
	return status.Error(st.Code(), wireText(st.Message()))
}

// wireText returns text as valid UTF-8 of limited length.
func wireText(text string) string {
	if len(text) > maxErrorLength {
		text = text[:maxErrorLength]
	}
	return strings.ToValidUTF8(text, "")
}

// MethodDesc describes a unary method. NewRequest and NewResponse return empty messages of the
// method's types.
type MethodDesc struct {
	Service, Method         string
	NewRequest, NewResponse func() proto.Message
}

// Describe returns the description of a method with request type Q and response type R.
func Describe[Q, R any, PQ Message[Q], PR Message[R]](service, method string) MethodDesc {
	return MethodDesc{
		Service: service, Method: method,
		NewRequest:  func() proto.Message { return PQ(new(Q)) },
		NewResponse: func() proto.Message { return PR(new(R)) },
	}
}
