// Package contract defines how the agent treats every field of the messages that create sandboxes,
// containers and their storages: the field is honoured, refused by name, or ignored for a reason
// that docs/messages.md gives. A field that is in no list is refused. The package only checks
// messages.
package contract

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/directvol/directvol/agent/errkind"
)

// verdict is how a field is treated.
type verdict string

const (
	honoured verdict = "honoured"
	refused  verdict = "refused"
	ignored  verdict = "ignored"
)

// field says how one field of a message is treated. Its name is the one in the .proto file; why
// says how the field is honoured, or why it is not. If a field is ignored or refused, so is
// everything inside it.
type field struct {
	name    string
	verdict verdict
	why     string
}

// Check refuses a message (a pointer to a type of protocols/agentpb) in which a refused field is
// set. For a message type that is not in fields, every field is refused.
func Check(message any) error { return check(reflect.ValueOf(message), "") }

func check(v reflect.Value, in string) error {
	for v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return nil
		}
		v = v.Elem()
	}
	for i := range v.NumField() {
		name, value := nameOf(v.Type().Field(i)), v.Field(i)
		if name == "" || !isSet(value) {
			continue
		}
		path := strings.TrimPrefix(in+"."+name, ".")
		switch f := of(v.Type().Name(), name); f.verdict {
		case honoured:
			if err := checkWithin(value, path); err != nil {
				return err
			}
		case ignored:
		default:
			return errkind.New(errkind.Unimplemented, "%s: not supported by this agent: %s", path, f.why)
		}
	}
	return nil
}

// checkWithin checks the messages inside a field.
func checkWithin(v reflect.Value, path string) error {
	switch {
	case isMessage(v.Type()):
		return check(v, path)
	case v.Kind() == reflect.Slice && isMessage(v.Type().Elem()):
		for i := range v.Len() {
			if err := check(v.Index(i), fmt.Sprintf("%s[%d]", path, i)); err != nil {
				return err
			}
		}
	}
	return nil
}

func isMessage(t reflect.Type) bool {
	return t.Kind() == reflect.Pointer && t.Elem().Kind() == reflect.Struct
}

// isSet reports whether a field differs from a field that was not sent.
func isSet(v reflect.Value) bool {
	if v.Kind() == reflect.Slice || v.Kind() == reflect.Map {
		return v.Len() > 0
	}
	return !v.IsZero()
}

// nameOf returns a field's name in the .proto file, or "" if f is not a field of the message.
func nameOf(f reflect.StructField) string {
	for part := range strings.SplitSeq(f.Tag.Get("protobuf"), ",") {
		if name, ok := strings.CutPrefix(part, "name="); ok {
			return name
		}
	}
	return ""
}

// of returns the entry for a field.
func of(message, name string) field {
	for _, m := range fields {
		if m.message != message {
			continue
		}
		if i := slices.IndexFunc(m.fields, func(f field) bool { return f.name == name }); i >= 0 {
			return m.fields[i]
		}
	}
	return field{name, refused, "the field is unknown"}
}

// Text returns the list in the form of docs/messages.md.
func Text() string {
	var text strings.Builder
	text.WriteString("# Which message fields the agent honours, ignores or refuses\n\n" +
		"The fields of Kata's messages that make sandboxes, containers and storages. A field that is refused ends its call\n" +
		"with UNIMPLEMENTED and its name, before anything is done. This file is made from agent/contract, by\n" +
		"`go test ./agent/contract -update`.\n")
	for _, m := range fields {
		fmt.Fprintf(&text, "\n## %s\n\n| field | is | |\n|---|---|---|\n", m.message)
		for _, f := range m.fields {
			fmt.Fprintf(&text, "| `%s` | %s | %s |\n", f.name, f.verdict, f.why)
		}
	}
	return text.String()
}
