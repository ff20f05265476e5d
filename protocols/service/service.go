// Package service adds types to ttrpc's untyped methods: a server registers functions on messages,
// a client gets the response's type back, and a table of method descriptions lets a program handle
// a service generically.
package service

import (
	"context"
	"errors"
	"io"
	"iter"
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

// Stream makes f a ttrpc method that has one request and answers with a stream of messages, for a
// ttrpc.ServiceDesc. f sends them with send, one at a time. send waits until the connection takes
// the message, and fails when the connection is over. Requests and errors are treated as in Method.
func Stream[Q, R any, PQ Message[Q], PR Message[R]](f func(ctx context.Context, request PQ, send func(PR) error) error) ttrpc.Stream {
	return ttrpc.Stream{StreamingServer: true, Handler: func(ctx context.Context, stream ttrpc.StreamServer) (any, error) {
		request := PQ(new(Q))
		if err := stream.RecvMsg(request); err != nil {
			return nil, status.Error(codes.InvalidArgument, wireText(status.Convert(err).Message()))
		}
		if err := f(ctx, request, func(message PR) error { return stream.SendMsg(message) }); err != nil {
			return nil, wireError(err)
		}
		return nil, nil
	}}
}

// Receive makes a call that is answered with a stream, and returns the stream's messages. The last
// element has the error that ended the stream, with a gRPC code as in Call; a stream that has ended
// as it should has none. codes.ResourceExhausted means that the caller was too slow: ttrpc's client
// keeps 64 messages and drops the next one after a second. The agent is not told if the caller
// stops earlier: then the caller must close the client.
func Receive[R any, PR Message[R]](ctx context.Context, client *ttrpc.Client, service, method string, request proto.Message) iter.Seq2[PR, error] {
	return func(yield func(PR, error) bool) {
		stream, err := client.NewStream(ctx, &ttrpc.StreamDesc{StreamingServer: true}, service, method, request)
		for err == nil {
			message := PR(new(R))
			if err = stream.RecvMsg(message); err == nil && !yield(message, nil) {
				return
			}
		}
		if !errors.Is(err, io.EOF) {
			yield(nil, callError(err))
		}
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
	case errors.Is(err, ttrpc.ErrStreamFull):
		return status.Error(codes.ResourceExhausted, "the stream's messages were not read in time, and some are lost: call again")
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

// MethodDesc describes a method. NewRequest and NewResponse return empty messages of the method's
// types. Streams is set if the method answers with a stream of responses.
type MethodDesc struct {
	Service, Method         string
	NewRequest, NewResponse func() proto.Message
	Streams                 bool
}

// DescribeStream is Describe for a method that answers with a stream of R.
func DescribeStream[Q, R any, PQ Message[Q], PR Message[R]](service, method string) MethodDesc {
	desc := Describe[Q, R, PQ, PR](service, method)
	desc.Streams = true
	return desc
}

// Describe returns the description of a method with request type Q and response type R.
func Describe[Q, R any, PQ Message[Q], PR Message[R]](service, method string) MethodDesc {
	return MethodDesc{
		Service: service, Method: method,
		NewRequest:  func() proto.Message { return PQ(new(Q)) },
		NewResponse: func() proto.Message { return PR(new(R)) },
	}
}
