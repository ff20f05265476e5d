package message

import (
	"fmt"
	"reflect"
	"strings"
	"unicode"

	"google.golang.org/protobuf/proto"
)

// Text writes a message for people: one line per field, with inner messages indented below. It
// writes zero numbers and booleans too; it omits empty lists, maps and messages. Each line begins
// with indent and ends with a newline. The text is safe for a terminal, whatever the strings
// contain.
func Text(m proto.Message, indent string) string {
	var out strings.Builder
	writeMessage(&out, indent, reflect.ValueOf(m).Elem())
	return out.String()
}

// step is the indentation of an inner level.
const step = "  "

func writeMessage(out *strings.Builder, indent string, v reflect.Value) {
	for _, f := range fieldsOf(v.Type()) {
		writeValue(out, indent, f.name, v.FieldByIndex(f.Index))
	}
}

func writeValue(out *strings.Builder, indent, name string, v reflect.Value) {
	switch {
	case enums[v.Type()] != nil:
		fmt.Fprintf(out, "%s%s: %s\n", indent, name, enumName(v))
	case v.Type() == bytesType:
		fmt.Fprintf(out, "%s%s: %q\n", indent, name, v.Bytes())
	case v.Kind() == reflect.Slice && messageIn(v.Type()) == nil:
		writeList(out, indent, name, v)
	case v.Kind() == reflect.Slice:
		for i := range v.Len() {
			writeValue(out, indent, fmt.Sprintf("%s[%d]", name, i), v.Index(i))
		}
	case v.Kind() == reflect.Map:
		for _, key := range sortedKeys(v) {
			writeValue(out, indent, fmt.Sprintf("%s[%q]", name, key), v.MapIndex(reflect.ValueOf(key)))
		}
	case v.Kind() == reflect.Pointer:
		if !absent(v) {
			fmt.Fprintf(out, "%s%s:\n", indent, name)
			writeMessage(out, indent+step, v.Elem())
		}
	case v.Kind() == reflect.String:
		writeString(out, indent, name, v.String())
	default:
		fmt.Fprintf(out, "%s%s: %s\n", indent, name, plain(v))
	}
}

// writeList writes a list of numbers and strings on one line.
func writeList(out *strings.Builder, indent, name string, v reflect.Value) {
	if v.Len() == 0 {
		return
	}
	var elements []string
	for i := range v.Len() {
		if element := v.Index(i); element.Kind() == reflect.String {
			elements = append(elements, Printable(element.String()))
		} else {
			elements = append(elements, plain(element))
		}
	}
	fmt.Fprintf(out, "%s%s: %s\n", indent, name, strings.Join(elements, ", "))
}

// writeString writes a string of several lines below the name, and a string of one line next to the
// name.
func writeString(out *strings.Builder, indent, name, text string) {
	text = strings.TrimSuffix(text, "\n")
	if !strings.Contains(text, "\n") {
		fmt.Fprintf(out, "%s%s: %s\n", indent, name, Printable(text))
		return
	}
	fmt.Fprintf(out, "%s%s:\n", indent, name)
	for line := range strings.SplitSeq(text, "\n") {
		fmt.Fprintf(out, "%s%s%s\n", indent, step, Printable(line))
	}
}

// Printable turns a guest's text into one line without control characters, which could otherwise
// control the terminal.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(text, "\uFFFD"))
}
