// Package ttrpcframe reads and writes what ttrpc puts on a connection
// (github.com/containerd/ttrpc, PROTOCOL.md and proto/ttrpc.proto): a header of
// ten bytes, and a request or a response. It is for those who must look at a
// call without ttrpc's server: to answer it at once, or to send it elsewhere.
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
	// MaxLength is how many bytes may follow it.
	MaxLength = 4 << 20
)

// Type is what a frame carries.
type Type uint8

// The types of frames.
const (
	TypeRequest  Type = 1
	TypeResponse Type = 2
	TypeData     Type = 3
)

// Header begins a frame.
type Header struct {
	Length   uint32 // of what follows the header, in bytes
	StreamID uint32 // odd for those that a client begins
	Type     Type
	Flags    uint8
}

// ParseHeader reads the header at the beginning of b, which holds HeaderBytes or
// more. Its Length is whatever the other side has written.
func ParseHeader(b []byte) Header {
	return Header{binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:]), Type(b[8]), b[9]}
}

// Append writes the header behind b.
func (h Header) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, h.Length)
	b = binary.BigEndian.AppendUint32(b, h.StreamID)
	return append(b, byte(h.Type), h.Flags)
}

// Request is a call. Its fields lie in the bytes that it was read from.
type Request struct {
	Service, Method, Payload []byte
	TimeoutNano              int64 // 0 where the caller sets none
	HasMetadata              bool
}

// Fields of ttrpc.Request, ttrpc.Response and google.rpc.Status.
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

// errField is a field that is not of its type.
var errField = errors.New("a field of another type")

// ParseRequest reads a request. What it does not know it passes over.
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

// set takes a field's value, which is whole; false means that it is of another
// type than the field.
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

// WithMetadata returns a request's frame, which is whole, with one more pair of metadata,
// before those that it has.
func WithMetadata(whole []byte, key, value string) []byte {
	pair := protowire.AppendString(protowire.AppendTag(nil, metadataKey, protowire.BytesType), key)
	pair = protowire.AppendString(protowire.AppendTag(pair, metadataValue, protowire.BytesType), value)
	header := ParseHeader(whole)
	header.Length += uint32(protowire.SizeTag(requestMetadata) + protowire.SizeBytes(len(pair)))
	b := header.Append(make([]byte, 0, HeaderBytes+header.Length))
	b = protowire.AppendBytes(protowire.AppendTag(b, requestMetadata, protowire.BytesType), pair)
	return append(b, whole[HeaderBytes:]...)
}

// WithTimeout returns a request's frame, which is whole, with another time-out: of a field
// that comes twice the last one holds.
func WithTimeout(whole []byte, nanos int64) []byte {
	header := ParseHeader(whole)
	header.Length += uint32(protowire.SizeTag(requestTimeoutNano) + protowire.SizeVarint(uint64(nanos)))
	b := header.Append(make([]byte, 0, HeaderBytes+header.Length))
	b = append(b, whole[HeaderBytes:]...)
	return protowire.AppendVarint(protowire.AppendTag(b, requestTimeoutNano, protowire.VarintType), uint64(nanos))
}

// AppendResponse writes the frame of a successful answer behind b.
func AppendResponse(b []byte, streamID uint32, payload []byte) []byte {
	length := protowire.SizeTag(responsePayload) + protowire.SizeBytes(len(payload))
	b = Header{Length: uint32(length), StreamID: streamID, Type: TypeResponse}.Append(b)
	b = protowire.AppendTag(b, responsePayload, protowire.BytesType)
	return protowire.AppendBytes(b, payload)
}

// AppendError writes the frame of an answer that is an error behind b.
func AppendError(b []byte, streamID uint32, code codes.Code, text string) []byte {
	status := protowire.AppendVarint(protowire.AppendTag(nil, statusCode, protowire.VarintType), uint64(code))
	status = protowire.AppendString(protowire.AppendTag(status, statusMessage, protowire.BytesType), text)
	length := protowire.SizeTag(responseStatus) + protowire.SizeBytes(len(status))
	b = Header{Length: uint32(length), StreamID: streamID, Type: TypeResponse}.Append(b)
	return protowire.AppendBytes(protowire.AppendTag(b, responseStatus, protowire.BytesType), status)
}
