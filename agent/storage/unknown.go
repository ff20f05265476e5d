package storage

import (
	"encoding/json"
	"maps"
	"reflect"
	"strings"
)

// rest are a JSON object's fields that this version does not know. They are written
// back as they were read: a later agent finds what it has written.
type rest map[string]json.RawMessage

// split decodes an object into known, a pointer to a structure, and returns the rest.
func split(text []byte, known any) (rest, error) {
	if err := json.Unmarshal(text, known); err != nil {
		return nil, err
	}
	var all rest
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, err
	}
	of := reflect.TypeOf(known).Elem()
	for i := range of.NumField() {
		name, _, _ := strings.Cut(of.Field(i).Tag.Get("json"), ",")
		maps.DeleteFunc(all, func(field string, _ json.RawMessage) bool { return strings.EqualFold(field, name) }) // as package json takes it
	}
	if len(all) == 0 {
		return nil, nil
	}
	return all, nil
}

// unite is split's inverse.
func unite(known any, more rest) ([]byte, error) {
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

// The known fields alone, so that the methods below do not call themselves.
type (
	knownSnapshot snapshot
	knownRecord   record
)

func (s *snapshot) UnmarshalJSON(text []byte) (err error) {
	s.more, err = split(text, (*knownSnapshot)(s))
	return err
}

func (s snapshot) MarshalJSON() ([]byte, error) { return unite(knownSnapshot(s), s.more) }

func (r *record) UnmarshalJSON(text []byte) (err error) {
	r.more, err = split(text, (*knownRecord)(r))
	return err
}

func (r record) MarshalJSON() ([]byte, error) { return unite(knownRecord(r), r.more) }
