package message

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
)

// JSON writes a message on one line, in the format that Decode reads. It writes every number,
// string, list and map, also empty ones, so that a program finds each field; it omits an absent
// message. 64-bit integers are plain numbers. The text is safe for a terminal, whatever the strings
// contain.
func JSON(m proto.Message) []byte {
	return appendMessage(nil, reflect.ValueOf(m).Elem())
}

func appendMessage(out []byte, v reflect.Value) []byte {
	out = append(out, '{')
	comma := false
	for _, f := range fieldsOf(v.Type()) {
		value := v.FieldByIndex(f.Index)
		if absent(value) {
			continue
		}
		if comma {
			out = append(out, ',')
		}
		comma = true
		out = append(appendString(out, f.name), ':')
		out = appendValue(out, value)
	}
	return append(out, '}')
}

// absent reports whether a value is a message that is not set.
func absent(v reflect.Value) bool { return v.Kind() == reflect.Pointer && v.IsNil() }

func appendValue(out []byte, v reflect.Value) []byte {
	switch {
	case enums[v.Type()] != nil:
		return appendEnum(out, v)
	case v.Type() == bytesType:
		return appendString(out, base64.StdEncoding.EncodeToString(v.Bytes()))
	case v.Kind() == reflect.Slice:
		out = append(out, '[')
		for i := range v.Len() {
			if i > 0 {
				out = append(out, ',')
			}
			out = appendValue(out, v.Index(i))
		}
		return append(out, ']')
	case v.Kind() == reflect.Map:
		out = append(out, '{')
		for i, key := range sortedKeys(v) {
			if i > 0 {
				out = append(out, ',')
			}
			out = append(appendString(out, key), ':')
			out = appendValue(out, v.MapIndex(reflect.ValueOf(key)))
		}
		return append(out, '}')
	case v.Kind() == reflect.Pointer:
		return appendMessage(out, v.Elem())
	case v.Kind() == reflect.String:
		return appendString(out, v.String())
	default:
		return append(out, plain(v)...)
	}
}

// appendEnum appends an enum's name, or its number if the name is unknown.
func appendEnum(out []byte, v reflect.Value) []byte {
	name := enumName(v)
	if _, known := enumNumber(v.Type(), name); known {
		return appendString(out, name)
	}
	return append(out, name...)
}

// appendString appends a JSON string; invalid UTF-8 becomes U+FFFD.
func appendString(out []byte, text string) []byte { return append(out, Quoted(text)...) }

// Quoted returns a guest's text as a JSON string. It escapes every rune that is not printable, and
// not only those that JSON requires: U+009B begins a control sequence of a terminal, as ESC [ does.
func Quoted(text string) json.RawMessage {
	quoted, _ := json.Marshal(text) // encoding a string never fails
	var out []byte
	for _, r := range string(quoted) {
		switch {
		case unicode.IsPrint(r):
			out = utf8.AppendRune(out, r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}

// plain writes a boolean or an integer.
func plain(v reflect.Value) string {
	switch {
	case v.CanInt():
		return strconv.FormatInt(v.Int(), 10)
	case v.CanUint():
		return strconv.FormatUint(v.Uint(), 10)
	default:
		return strconv.FormatBool(v.Bool())
	}
}

// sortedKeys returns the keys of a map. All maps of the protocol have string keys.
func sortedKeys(v reflect.Value) []string {
	var keys []string
	for _, key := range v.MapKeys() {
		keys = append(keys, key.String())
	}
	slices.Sort(keys)
	return keys
}
