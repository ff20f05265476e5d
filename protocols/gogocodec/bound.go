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
	// MaxGrowth is how many bytes a message may take in memory for each on the wire, beside freeBytes. Two bytes are an empty message in a list,
	// and more than a hundred when it is decoded; what Kata's runtime sends takes about two.
	MaxGrowth = 4
	freeBytes = 16 << 10

	// itemBytes is counted for an element of a list beside what it holds: its place in the list, and in those that it outgrew.
	itemBytes = 32
	// entryBytes is counted for an entry of a map.
	entryBytes = 128
)

// checkGrowth refuses an encoded message that would take far more memory than it has bytes. What is not well formed it leaves to Unmarshal.
func checkGrowth(m Message, wire []byte) error {
	limit := freeBytes + MaxGrowth*len(wire)
	if size := decodedSize(reflect.TypeOf(m).Elem(), wire); size > limit {
		return fmt.Errorf("%d bytes would take %d when they are decoded, want at most %d", len(wire), size, limit)
	}
	return nil
}

// decodedSize estimates, from above, how many bytes a message's fields take.
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

// field is what one occurrence on the wire takes: so many bytes, so many for each byte that it has, and what the message in it takes.
type field struct {
	each, perByte int
	message       reflect.Type
}

// known are the fields of each message that was decoded, by its type.
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
		if f.message == nil && t.Elem().Kind() != reflect.String { // packed: a byte can be a number
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
