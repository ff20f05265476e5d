// Package service makes ttrpc's untyped methods typed: a server registers functions on messages, a client gets the response's type back, and a
// table of descriptions lets a program walk a service without knowing it.
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

// maxErrorLength bounds the message of an error on the wire, in bytes.
const maxErrorLength = 4 << 10

// Message is a pointer to T that is a message.
type Message[T any] interface {
	*T
	proto.Message
}

// Method makes a unary ttrpc method of f, to be listed in a ttrpc.ServiceDesc. A payload that does not decode is answered with
// codes.InvalidArgument and never reaches f. f's error keeps its gRPC code; its text is made fit for the wire, because ttrpc drops the whole
// connection over a status that does not encode.
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

// Call makes a unary call and returns its response. Its errors carry a gRPC code, also where ttrpc gives a bare one: a context that ended is
// codes.DeadlineExceeded or codes.Canceled, a connection that ended codes.Unavailable, an answer that does not decode codes.Internal.
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

// callError gives an error of ttrpc's client the code that it lacks.
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

// wireError is err as it may go on the wire.
func wireError(err error) error {
	st, ok := status.FromError(err)
	if !ok && wireText(err.Error()) == err.Error() {
		return err // ttrpc finds the code of the standard library's errors.
	}
	return status.Error(st.Code(), wireText(st.Message()))
}

// wireText is text as valid UTF-8 of bounded length.
func wireText(text string) string {
	if len(text) > maxErrorLength {
		text = text[:maxErrorLength]
	}
	return strings.ToValidUTF8(text, "")
}

// MethodDesc describes a unary method. NewRequest and NewResponse return empty messages of its types.
type MethodDesc struct {
	Service, Method         string
	NewRequest, NewResponse func() proto.Message
}

// Describe makes the description of a method with the request type Q and the response type R.
func Describe[Q, R any, PQ Message[Q], PR Message[R]](service, method string) MethodDesc {
	return MethodDesc{
		Service: service, Method: method,
		NewRequest:  func() proto.Message { return PQ(new(Q)) },
		NewResponse: func() proto.Message { return PR(new(R)) },
	}
}
