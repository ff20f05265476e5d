// Package ttrpcframe parses and formats ttrpc's frames (github.com/containerd/ttrpc, PROTOCOL.md
// and proto/ttrpc.proto): a header of ten bytes, and a request or a response. It is for code that
// must inspect a call without ttrpc's server, to answer it at once or to forward it.
package ttrpcframe

import (
	"encoding/binary"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
)

const (
	// HeaderBytes is the length of a header.
	HeaderBytes = 10
	// MaxLength is the greatest number of bytes after a header.
	MaxLength = 4 << 20
)

// Type is the type of a frame.
type Type uint8

// The types of frames.
const (
	TypeRequest  Type = 1
	TypeResponse Type = 2
	TypeData     Type = 3
)

// FlagRemoteClosed in a frame of data is set if the sender sends no more on the stream.
const FlagRemoteClosed = 0x1

// Header is the header of a frame.
type Header struct {
	Length   uint32 // bytes after the header
	StreamID uint32 // odd for streams that a client begins
	Type     Type
	Flags    uint8
}

// ParseHeader parses the header at the beginning of b, which must have at least HeaderBytes bytes.
// The Length is not checked.
func ParseHeader(b []byte) Header {
	return Header{binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:]), Type(b[8]), b[9]}
}

// EndsCall reports whether a server's frame is the last one of its call: the response, or the last
// data of a stream.
func (h Header) EndsCall() bool {
	return h.Type == TypeResponse || h.Type == TypeData && h.Flags&FlagRemoteClosed != 0
}

// Append appends the header to b.
func (h Header) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, h.Length)
	b = binary.BigEndian.AppendUint32(b, h.StreamID)
	return append(b, byte(h.Type), h.Flags)
}

// Request is a call. Its slices refer to the bytes from which it was parsed.
type Request struct {
	Service, Method, Payload []byte
	TimeoutNano              int64 // 0 if the caller sets none
	HasMetadata              bool
}

// Field numbers of ttrpc.Request, ttrpc.Response and google.rpc.Status.
const (
	requestService     = 1
	requestMethod      = 2
	requestPayload     = 3
	requestTimeoutNano = 4
	requestMetadata    = 5
	responseStatus     = 1
	responsePayload    = 2
	statusCode         = 1
	statusMessage      = 2
	metadataKey        = 1
	metadataValue      = 2
)

// errField means that a field has the wrong type.
var errField = errors.New("a field of another type")

// ParseRequest parses a request. It skips unknown fields.
func ParseRequest(b []byte) (Request, error) {
	var r Request
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return r, fmt.Errorf("ttrpc request: %w", protowire.ParseError(n))
		}
		b = b[n:]
		if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
			return r, fmt.Errorf("ttrpc request: field %d: %w", number, protowire.ParseError(n))
		}
		if !r.set(number, kind, b[:n]) {
			return r, fmt.Errorf("ttrpc request: field %d: %w", number, errField)
		}
		b = b[n:]
	}
	return r, nil
}

// set sets a field from its complete encoded value. It returns false if the value has another type
// than the field.
func (r *Request) set(number protowire.Number, kind protowire.Type, value []byte) bool {
	if number == requestTimeoutNano {
		timeout, _ := protowire.ConsumeVarint(value)
		r.TimeoutNano = int64(timeout)
		return kind == protowire.VarintType
	}
	bytes, _ := protowire.ConsumeBytes(value)
	switch number {
	case requestService:
		r.Service = bytes
	case requestMethod:
		r.Method = bytes
	case requestPayload:
		r.Payload = bytes
	case requestMetadata:
		r.HasMetadata = true
	default:
		return true
	}
	return kind == protowire.BytesType
}

// WithMetadata returns a complete request frame with one more metadata pair, before the existing
// ones.
func WithMetadata(whole []byte, key, value string) []byte {
	pair := protowire.AppendString(protowire.AppendTag(nil, metadataKey, protowire.BytesType), key)
	pair = protowire.AppendString(protowire.AppendTag(pair, metadataValue, protowire.BytesType), value)
	header := ParseHeader(whole)
	header.Length += uint32(protowire.SizeTag(requestMetadata) + protowire.SizeBytes(len(pair)))
	b := header.Append(make([]byte, 0, HeaderBytes+header.Length))
	b = protowire.AppendBytes(protowire.AppendTag(b, requestMetadata, protowire.BytesType), pair)
	return append(b, whole[HeaderBytes:]...)
}

// WithTimeout returns a complete request frame with another timeout. It appends the field: if a
// field occurs twice, the last one counts.
func WithTimeout(whole []byte, nanos int64) []byte {
	header := ParseHeader(whole)
	header.Length += uint32(protowire.SizeTag(requestTimeoutNano) + protowire.SizeVarint(uint64(nanos)))
	b := header.Append(make([]byte, 0, HeaderBytes+header.Length))
	b = append(b, whole[HeaderBytes:]...)
	return protowire.AppendVarint(protowire.AppendTag(b, requestTimeoutNano, protowire.VarintType), uint64(nanos))
}

// AppendResponse appends the frame of a successful answer to b.
func AppendResponse(b []byte, streamID uint32, payload []byte) []byte {
	length := protowire.SizeTag(responsePayload) + protowire.SizeBytes(len(payload))
	b = Header{Length: uint32(length), StreamID: streamID, Type: TypeResponse}.Append(b)
	b = protowire.AppendTag(b, responsePayload, protowire.BytesType)
	return protowire.AppendBytes(b, payload)
}

// AppendError appends the frame of an answer with an error to b.
func AppendError(b []byte, streamID uint32, code codes.Code, text string) []byte {
	status := protowire.AppendVarint(protowire.AppendTag(nil, statusCode, protowire.VarintType), uint64(code))
	status = protowire.AppendString(protowire.AppendTag(status, statusMessage, protowire.BytesType), text)
	length := protowire.SizeTag(responseStatus) + protowire.SizeBytes(len(status))
	b = Header{Length: uint32(length), StreamID: streamID, Type: TypeResponse}.Append(b)
	return protowire.AppendBytes(protowire.AppendTag(b, responseStatus, protowire.BytesType), status)
}
