// Package message reads and writes the generated messages of protocols/ in forms for people: it
// reads a request as JSON (RFC 8259), writes an answer as JSON or as text, and lists a message's
// fields. Names are those of the .proto files. The package walks through the generated structs by
// reflection, because they carry no descriptors. An alternative was tried: descriptors from the
// .proto files (protocompile, dynamicpb) with protojson. But protojson's errors name a line and
// column instead of the field's path and the possible fields, it accepts names in one case only,
// and it writes 64-bit integers as strings. The decoder and the encoder would still be needed.
package message

import (
	"reflect"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
)

// Type is a message type, for people.
type Type struct {
	Name   string
	Fields []Field
}

// Field is one field of a message type.
type Field struct {
	Name string // as in the .proto file
	Type string // such as "uint64", "repeated Storage" or "map<string, string>"; an enum is its names: "BYTES|INODES"
}

// Describe describes the types of the messages, followed by each message type inside them, once, in
// the order of their first use.
func Describe(messages ...proto.Message) []Type {
	var described []Type
	var seen []reflect.Type
	for _, m := range messages {
		seen = append(seen, reflect.TypeOf(m).Elem())
	}
	for i := 0; i < len(seen); i++ {
		d := Type{Name: seen[i].Name()}
		for _, f := range fieldsOf(seen[i]) {
			d.Fields = append(d.Fields, Field{f.name, typeName(f.Type)})
			if inner := messageIn(f.Type); inner != nil && !slices.Contains(seen, inner) {
				seen = append(seen, inner)
			}
		}
		described = append(described, d)
	}
	return described
}

// field is one field of a generated struct.
type field struct {
	reflect.StructField
	name string
}

// fieldsOf returns the encoded fields of a generated struct, in the order of the .proto file.
func fieldsOf(t reflect.Type) []field {
	var fields []field
	for _, f := range reflect.VisibleFields(t) {
		if _, onWire := f.Tag.Lookup("protobuf"); onWire {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			fields = append(fields, field{f, name})
		}
	}
	return fields
}

var bytesType = reflect.TypeFor[[]byte]()

// typeName returns the name of a field's type in a .proto file. Go's names of proto's scalar types
// are the same as proto's.
func typeName(t reflect.Type) string {
	switch {
	case enums[t] != nil:
		return strings.Join(enumNames(t), "|")
	case t == bytesType:
		return "bytes"
	case t.Kind() == reflect.Slice:
		return "repeated " + typeName(t.Elem())
	case t.Kind() == reflect.Map:
		return "map<" + typeName(t.Key()) + ", " + typeName(t.Elem()) + ">"
	case t.Kind() == reflect.Pointer:
		return t.Elem().Name()
	default:
		return t.Kind().String()
	}
}

// messageIn returns the message type of a field or of its elements, and nil if the field holds no
// messages.
func messageIn(t reflect.Type) reflect.Type {
	switch {
	case t.Kind() == reflect.Slice, t.Kind() == reflect.Map:
		return messageIn(t.Elem())
	case t.Kind() == reflect.Pointer:
		return t.Elem()
	default:
		return nil
	}
}
