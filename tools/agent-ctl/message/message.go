// Package message is how people read and write the generated messages of protocols/: a request comes in as JSON (RFC 8259),
// an answer goes out as JSON or as text, and a message's fields can be listed. Names are those of the .proto files. It walks the
// generated structs by reflection, because they carry no descriptors. Descriptors from the .proto files (protocompile, dynamicpb) with
// protojson were tried: protojson names the line and column of an error, not the field's path or the fields that there are, takes names
// in one case alone, and writes 64-bit integers as strings. The decoder and the encoder would have to stay.
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

// Describe describes the types of the messages, and after them each message type within, once, in the order in which they
// are met.
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

// fieldsOf returns the fields of a generated struct that are on the wire, in the order of the .proto file.
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

// typeName names the type of a field in the words of a .proto file. Go's names of proto's scalar types are proto's own.
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

// messageIn returns the message type that a field holds, or holds several of, and nil where it holds none.
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
