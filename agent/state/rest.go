package state

import (
	"encoding/json"
	"maps"
	"reflect"
	"strings"
)

// Rest are the fields of a JSON object that this version does not know. They are written back
// unchanged, so that a later version finds what it has written.
type Rest map[string]json.RawMessage

// Split decodes an object into known, a pointer to a struct, and returns the remaining fields.
func Split(text []byte, known any) (Rest, error) {
	if err := json.Unmarshal(text, known); err != nil {
		return nil, err
	}
	var all Rest
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, err
	}
	for _, field := range reflect.VisibleFields(reflect.TypeOf(known).Elem()) { // includes the fields of an embedded Header
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "" {
			continue // not encoded
		}
		maps.DeleteFunc(all, func(field string, _ json.RawMessage) bool { return strings.EqualFold(field, name) }) // package json ignores case, too
	}
	if len(all) == 0 {
		return nil, nil
	}
	return all, nil
}

// Unite is the inverse of Split.
func Unite(known any, more Rest) ([]byte, error) {
	text, err := json.Marshal(known)
	if err != nil || len(more) == 0 {
		return text, err
	}
	all := maps.Clone(more)
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, err
	}
	return json.Marshal(all)
}
