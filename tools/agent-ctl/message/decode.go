package message

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
)

// Decode reads a JSON object into an empty message. Field names are those of the .proto file,
// regardless of case; an unknown field is refused, and so is a duplicate. An enum is a name or a
// number, bytes are base64 (RFC 4648, section 4), an integer may be a string of digits, and null
// leaves a field unset. Errors name the field. After an error the caller must discard the message.
func Decode(text []byte, m proto.Message) error {
	d := decoder{json.NewDecoder(bytes.NewReader(text))}
	d.UseNumber()
	token, err := d.next("request")
	if err != nil {
		return err
	}
	if err := d.message(reflect.ValueOf(m).Elem(), token, "request"); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("request: more text after its end")
	}
	return nil
}

// decoder walks through the tokens. The message's type bounds the depth of the recursion. The path
// of the current field is only used in errors.
type decoder struct{ *json.Decoder }

func (d decoder) next(path string) (json.Token, error) {
	token, err := d.Token()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return token, nil
}

// message reads the fields of a message. The caller has read the first token.
func (d decoder) message(v reflect.Value, token json.Token, path string) error {
	if token != json.Delim('{') {
		return mismatch(path, v.Type().Name(), token)
	}
	fields := fieldsOf(v.Type())
	given := map[string]bool{}
	return d.members(path, func(key, _ string) error {
		f, ok := find(fields, key)
		if !ok {
			return fmt.Errorf("%s: unknown field %.80q: %s has %s", path, key, v.Type().Name(), names(fields))
		}
		path := path + "." + f.name
		if given[f.name] {
			return fmt.Errorf("%s: given twice", path)
		}
		given[f.name] = true
		token, err := d.next(path)
		if err != nil || token == nil {
			return err
		}
		return d.value(v.FieldByIndex(f.Index), token, path)
	})
}

// members calls read for each member of an object, after its key.
func (d decoder) members(path string, read func(key, path string) error) error {
	for d.More() {
		token, err := d.next(path)
		if err != nil {
			return err
		}
		key, ok := token.(string)
		if !ok {
			return mismatch(path, "a name", token)
		}
		if err := read(key, fmt.Sprintf("%s[%.80q]", path, key)); err != nil {
			return err
		}
	}
	_, err := d.next(path)
	return err
}

func find(fields []field, name string) (field, bool) {
	for _, f := range fields {
		if strings.EqualFold(f.name, name) {
			return f, true
		}
	}
	return field{}, false
}

func names(fields []field) string {
	if len(fields) == 0 {
		return "none"
	}
	var all []string
	for _, f := range fields {
		all = append(all, f.name)
	}
	return strings.Join(all, ", ")
}

// value reads a field, or one element of it. The caller has read the first token.
func (d decoder) value(v reflect.Value, token json.Token, path string) error {
	t := v.Type()
	switch {
	case enums[t] != nil:
		return enum(v, token, path)
	case t == bytesType:
		return binary(v, token, path)
	case t.Kind() == reflect.Slice:
		return d.list(v, token, path)
	case t.Kind() == reflect.Map:
		return d.mapping(v, token, path)
	case t.Kind() == reflect.Pointer:
		v.Set(reflect.New(t.Elem()))
		return d.message(v.Elem(), token, path)
	default:
		return scalar(v, token, path)
	}
}

func (d decoder) list(v reflect.Value, token json.Token, path string) error {
	if token != json.Delim('[') {
		return mismatch(path, typeName(v.Type()), token)
	}
	for i := 0; d.More(); i++ {
		path := fmt.Sprintf("%s[%d]", path, i)
		token, err := d.next(path)
		if err != nil {
			return err
		}
		element := reflect.New(v.Type().Elem()).Elem()
		if err := d.value(element, token, path); err != nil {
			return err
		}
		v.Set(reflect.Append(v, element))
	}
	_, err := d.next(path)
	return err
}

// mapping reads a map. All maps of the protocol have string keys.
func (d decoder) mapping(v reflect.Value, token json.Token, path string) error {
	if token != json.Delim('{') {
		return mismatch(path, typeName(v.Type()), token)
	}
	v.Set(reflect.MakeMap(v.Type()))
	return d.members(path, func(key, path string) error {
		token, err := d.next(path)
		if err != nil {
			return err
		}
		if v.MapIndex(reflect.ValueOf(key)).IsValid() {
			return fmt.Errorf("%s: given twice", path)
		}
		element := reflect.New(v.Type().Elem()).Elem()
		if err := d.value(element, token, path); err != nil {
			return err
		}
		v.SetMapIndex(reflect.ValueOf(key), element)
		return nil
	})
}

func enum(v reflect.Value, token json.Token, path string) error {
	text, isName := token.(string)
	if number, ok := enumNumber(v.Type(), text); ok {
		v.SetInt(int64(number))
		return nil
	}
	if isName {
		return fmt.Errorf("%s: %.80q is none of %s", path, text, typeName(v.Type()))
	}
	return scalar(v, token, path)
}

func binary(v reflect.Value, token json.Token, path string) error {
	text, ok := token.(string)
	if !ok {
		return mismatch(path, "base64", token)
	}
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	v.SetBytes(data)
	return nil
}

func scalar(v reflect.Value, token json.Token, path string) error {
	text, isText := token.(string)
	if number, ok := token.(json.Number); ok {
		text = number.String()
	}
	switch on, isBool := token.(bool); {
	case v.Kind() == reflect.String && isText:
		v.SetString(text)
		return nil
	case v.Kind() == reflect.Bool && isBool:
		v.SetBool(on)
		return nil
	case v.CanInt() && text != "":
		number, err := strconv.ParseInt(text, 10, v.Type().Bits())
		v.SetInt(number)
		return badNumber(err, v, text, path)
	case v.CanUint() && text != "":
		number, err := strconv.ParseUint(text, 10, v.Type().Bits())
		v.SetUint(number)
		return badNumber(err, v, text, path)
	}
	return mismatch(path, v.Kind().String(), token)
}

func badNumber(err error, v reflect.Value, text, path string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %.40q is no %s", path, text, v.Kind())
}

func mismatch(path, want string, token json.Token) error {
	return fmt.Errorf("%s: want %s, got %s", path, want, kindOf(token))
}

func kindOf(token json.Token) string {
	switch token := token.(type) {
	case nil:
		return "null"
	case string:
		return "a string"
	case bool:
		return strconv.FormatBool(token)
	case json.Number:
		return "a number"
	}
	if token == json.Delim('{') {
		return "an object"
	}
	return "a list"
}
