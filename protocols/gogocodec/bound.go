package gogocodec

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"
)

const (
	// MaxGrowth limits the memory of a decoded message, in bytes per byte on the wire, in addition
	// to freeBytes. An empty message in a list has two bytes on the wire and more than a hundred in
	// memory. Kata's runtime needs a factor of about two.
	MaxGrowth = 4
	freeBytes = 16 << 10

	// itemBytes is the estimate for a list element in addition to its content: its place in the
	// list, and in the smaller arrays that the list outgrew.
	itemBytes = 32
	// entryBytes is the estimate for an entry of a map.
	entryBytes = 128
)

// checkGrowth refuses an encoded message that would need far more memory than its length. It
// ignores malformed parts, which Unmarshal refuses.
func checkGrowth(m Message, wire []byte) error {
	limit := freeBytes + MaxGrowth*len(wire)
	if size := decodedSize(reflect.TypeOf(m).Elem(), wire); size > limit {
		return fmt.Errorf("%d bytes would take %d when they are decoded, want at most %d", len(wire), size, limit)
	}
	return nil
}

// decodedSize returns an upper estimate of the memory for a message's fields, in bytes.
func decodedSize(of reflect.Type, wire []byte) (size int) {
	fields := fieldsOf(of)
	for len(wire) > 0 {
		number, kind, n := protowire.ConsumeTag(wire)
		if n < 0 {
			return size
		}
		wire = wire[n:]
		if n = protowire.ConsumeFieldValue(number, kind, wire); n < 0 {
			return size
		}
		f, known := fields[number]
		if content, _ := protowire.ConsumeBytes(wire[:n]); known && kind == protowire.BytesType {
			size += f.each + f.perByte*len(content)
			if f.message != nil {
				size += decodedSize(f.message, content)
			}
		} else if known {
			size += f.each
		}
		wire = wire[n:]
	}
	return size
}

// field is the memory for one occurrence of a field: each, plus perByte for each byte of its
// content, plus the fields of the message in it, if any.
type field struct {
	each, perByte int
	message       reflect.Type
}

// known caches the fields of message types, by type.
var known sync.Map

func fieldsOf(message reflect.Type) map[protowire.Number]field {
	if fields, ok := known.Load(message); ok {
		return fields.(map[protowire.Number]field)
	}
	fields := map[protowire.Number]field{}
	for i := range message.NumField() {
		f := message.Field(i)
		if tag := strings.Split(f.Tag.Get("protobuf"), ","); len(tag) > 1 {
			number, _ := strconv.Atoi(tag[1])
			fields[protowire.Number(number)] = fieldOf(f.Type)
		}
	}
	known.Store(message, fields)
	return fields
}

func fieldOf(t reflect.Type) field {
	switch t.Kind() {
	case reflect.Pointer:
		return field{each: int(t.Elem().Size()), message: t.Elem()}
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return field{perByte: 1}
		}
		f := fieldOf(t.Elem())
		f.each += itemBytes
		if f.message == nil && t.Elem().Kind() != reflect.String { // packed: each byte may be a number
			f.perByte = int(t.Elem().Size())
		}
		return f
	case reflect.Map:
		f := field{each: entryBytes, perByte: 1}
		if value := t.Elem(); value.Kind() == reflect.Pointer {
			f.each += int(value.Elem().Size())
		}
		return f
	case reflect.String:
		return field{perByte: 1}
	}
	return field{}
}
