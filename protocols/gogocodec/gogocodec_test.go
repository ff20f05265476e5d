package gogocodec_test

import (
	"context"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/bufbuild/protocompile"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
)

// The test compares each message, in both directions, with the encoding by
// google.golang.org/protobuf from the compiled .proto file alone, and sends it over ttrpc.
func TestEveryMessageCrossesTheBridge(t *testing.T) {
	descriptors, types := messageDescriptors(t), messageTypes()
	client := echo(t, types)
	for name := range types {
		if descriptors[name] == nil {
			t.Errorf("%s is no message of the .proto files", name)
		}
	}
	for name, descriptor := range descriptors {
		t.Run(string(name), func(t *testing.T) {
			goType, ok := types[name]
			if !ok {
				t.Fatal("no method leads to this message: nothing tests it")
			}
			filled, ok := fill(goType).(proto.Message)
			if !ok {
				t.Fatalf("%s has no ProtoReflect: ttrpc cannot carry it", goType)
			}
			wire, err := proto.Marshal(filled)
			if err != nil {
				t.Fatal(err)
			}
			independent := dynamicpb.NewMessage(descriptor)
			if err := proto.Unmarshal(wire, independent); err != nil {
				t.Fatal(err)
			}
			sameMessage(t, reflect.ValueOf(filled).Elem(), independent)

			back, err := proto.Marshal(independent)
			if err != nil {
				t.Fatal(err)
			}
			decoded := reflect.New(goType).Interface().(proto.Message)
			if err := proto.Unmarshal(back, decoded); err != nil {
				t.Fatal(err)
			}
			equal(t, filled, decoded)

			carried := reflect.New(goType).Interface()
			if err := client.Call(t.Context(), "echo", string(name), filled, carried); err != nil {
				t.Fatal(err)
			}
			equal(t, filled, carried)
		})
	}
}

func TestUnknownFieldsAreSkipped(t *testing.T) {
	want := &agentpb.VolumeUsage{Total: 7, Unit: agentpb.VolumeUsage_BYTES}
	wire, err := proto.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	wire = protowire.AppendVarint(protowire.AppendTag(wire, 1000, protowire.VarintType), 5)
	wire = protowire.AppendString(protowire.AppendTag(wire, 1001, protowire.BytesType), "later")
	wire = protowire.AppendFixed64(protowire.AppendTag(wire, 1002, protowire.Fixed64Type), 6)
	got := &agentpb.VolumeUsage{}
	if err := proto.Unmarshal(wire, got); err != nil {
		t.Fatal(err)
	}
	equal(t, want, got)
}

func TestUnmarshalForgetsWhatTheMessageHeld(t *testing.T) {
	got := &agentpb.VolumeUsage{Total: 7}
	if err := proto.Unmarshal(nil, got); err != nil {
		t.Fatal(err)
	}
	equal(t, &agentpb.VolumeUsage{}, got)
}

func TestMarshalAppends(t *testing.T) {
	got, err := proto.MarshalOptions{}.MarshalAppend([]byte("before"), &agentpb.CheckRequest{Service: "s"})
	if err != nil {
		t.Fatal(err)
	}
	if want := "before\x0a\x01s"; string(got) != want {
		t.Errorf("want %q\ngot  %q", want, got)
	}
}

func TestNilMessageIsEmpty(t *testing.T) {
	wire, err := proto.Marshal((*agentpb.CheckRequest)(nil))
	if err != nil || len(wire) != 0 {
		t.Errorf("want no bytes and no error\ngot  %x, %v", wire, err)
	}
}

// FuzzUnmarshal decodes arbitrary bytes as each message in turn. An accepted message must stay the
// same when it is encoded and decoded again.
func FuzzUnmarshal(f *testing.F) {
	types := messageTypes()
	names := slices.Sorted(maps.Keys(types))
	for i, name := range names {
		wire, err := proto.Marshal(fill(types[name]).(proto.Message))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(i), wire)
		f.Add(uint8(i), wire[:len(wire)/2])
	}
	f.Fuzz(func(t *testing.T, which uint8, wire []byte) {
		goType := types[names[int(which)%len(names)]]
		m, second := reflect.New(goType).Interface().(proto.Message), reflect.New(goType).Interface().(proto.Message)
		if proto.Unmarshal(wire, m) != nil {
			return
		}
		again, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if err := proto.Unmarshal(again, second); err != nil {
			t.Fatalf("%T decodes, but not after it was encoded again: %v", m, err)
		}
		// The comparison is not with m, because bytes fields that are present and empty are absent
		// after encoding.
		third := reflect.New(goType).Interface().(proto.Message)
		twice, err := proto.Marshal(second)
		if err == nil {
			err = proto.Unmarshal(twice, third)
		}
		if err != nil || len(twice) != len(again) {
			t.Fatalf("%T: %d bytes became %d, error %v", m, len(again), len(twice), err)
		}
		equal(t, second, third)
	})
}

// messageDescriptors compiles the .proto files.
func messageDescriptors(t *testing.T) map[protoreflect.FullName]protoreflect.MessageDescriptor {
	t.Helper()
	compiler := protocompile.Compiler{
		Resolver: protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{"../proto"}}),
	}
	paths, err := filepath.Glob("../proto/*.proto")
	if err != nil {
		t.Fatal(err)
	}
	for i := range paths {
		paths[i] = filepath.Base(paths[i])
	}
	files, err := compiler.Compile(t.Context(), paths...)
	if err != nil {
		t.Fatal(err)
	}
	descriptors := map[protoreflect.FullName]protoreflect.MessageDescriptor{}
	for _, file := range files {
		for i := range file.Messages().Len() {
			m := file.Messages().Get(i)
			descriptors[m.FullName()] = m
		}
	}
	return descriptors
}

// messageTypes returns the struct types of all messages that a method takes, returns or contains.
func messageTypes() map[protoreflect.FullName]reflect.Type {
	types := map[protoreflect.FullName]reflect.Type{}
	var walk func(t reflect.Type)
	walk = func(t reflect.Type) {
		switch t.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Map:
			walk(t.Elem())
		case reflect.Struct:
			room, ok := map[string]string{"agentpb": "grpc", "typespb": "types", "volumepb": "directvol.v1"}[t.PkgPath()[strings.LastIndex(t.PkgPath(), "/")+1:]]
			name := protoreflect.FullName(room + "." + t.Name())
			if !ok || types[name] != nil {
				return
			}
			types[name] = t
			for i := range t.NumField() {
				walk(t.Field(i).Type)
			}
		}
	}
	for _, m := range slices.Concat(agentpb.Methods(), volumepb.Methods()) {
		walk(reflect.TypeOf(m.NewRequest()))
		walk(reflect.TypeOf(m.NewResponse()))
	}
	return types
}

// echo serves one method for each message, which returns the message it was sent, and returns a
// client.
func echo(t *testing.T, types map[protoreflect.FullName]reflect.Type) *ttrpc.Client {
	t.Helper()
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	methods := map[string]ttrpc.Method{}
	for name, goType := range types {
		methods[string(name)] = func(_ context.Context, unmarshal func(any) error) (any, error) {
			m := reflect.New(goType).Interface()
			return m, unmarshal(m)
		}
	}
	server.RegisterService("echo", &ttrpc.ServiceDesc{Methods: methods})
	listener, err := net.Listen("unix", filepath.Join(t.TempDir(), "echo"))
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(context.Background(), listener)
	t.Cleanup(func() { server.Close() })
	conn, err := net.Dial("unix", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	client := ttrpc.NewClient(conn)
	t.Cleanup(func() { client.Close() })
	return client
}

// fill returns a message of the type with a different value in each field, and two elements in each
// list and map.
func fill(goType reflect.Type) any {
	count := 0
	var set func(v reflect.Value)
	set = func(v reflect.Value) {
		count++
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				set(v.Field(i))
			}
		case reflect.Pointer:
			v.Set(reflect.New(v.Type().Elem()))
			set(v.Elem())
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 2, 2))
			set(v.Index(0))
			set(v.Index(1))
		case reflect.Map:
			v.Set(reflect.MakeMap(v.Type()))
			for range 2 {
				key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
				set(key)
				set(value)
				v.SetMapIndex(key, value)
			}
		case reflect.String:
			v.SetString(fmt.Sprint("text ", count))
		case reflect.Bool:
			v.SetBool(true)
		case reflect.Int32, reflect.Int64:
			v.SetInt(-int64(count))
		case reflect.Uint8, reflect.Uint32, reflect.Uint64:
			v.SetUint(uint64(count))
		default:
			panic("no value for " + v.Type().String())
		}
	}
	message := reflect.New(goType)
	set(message.Elem())
	return message.Interface()
}

// sameMessage compares a generated message with a dynamic one, field by field, by their names in
// the .proto file.
func sameMessage(t *testing.T, generated reflect.Value, independent protoreflect.Message) {
	t.Helper()
	name := independent.Descriptor().FullName()
	if unknown := independent.GetUnknown(); len(unknown) != 0 {
		t.Errorf("%s has fields that the .proto file has not: %x", name, unknown)
	}
	fields := independent.Descriptor().Fields()
	if want, got := fields.Len(), generated.NumField(); want != got {
		t.Errorf("fields of %s:\nwant %d\ngot  %d", name, want, got)
	}
	for i := range generated.NumField() {
		field := fields.ByTextName(protoName(generated.Type().Field(i)))
		if field == nil {
			t.Errorf("%s.%s is not in the .proto file", name, generated.Type().Field(i).Name)
			continue
		}
		sameField(t, generated.Field(i), independent.Get(field), field)
	}
}

func sameField(t *testing.T, generated reflect.Value, independent protoreflect.Value, field protoreflect.FieldDescriptor) {
	t.Helper()
	switch {
	case field.IsMap():
		if want, got := independent.Map().Len(), generated.Len(); want != got {
			t.Errorf("entries of %s:\nwant %d\ngot  %d", field.FullName(), want, got)
		}
		independent.Map().Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
			entry := generated.MapIndex(reflect.ValueOf(key.Interface()))
			if !entry.IsValid() {
				t.Errorf("%s lacks %v", field.FullName(), key)
				return true
			}
			sameValue(t, entry, value, field.MapValue())
			return true
		})
	case field.IsList():
		if want, got := independent.List().Len(), generated.Len(); want != got {
			t.Fatalf("elements of %s:\nwant %d\ngot  %d", field.FullName(), want, got)
		}
		for i := range generated.Len() {
			sameValue(t, generated.Index(i), independent.List().Get(i), field)
		}
	default:
		sameValue(t, generated, independent, field)
	}
}

func sameValue(t *testing.T, generated reflect.Value, independent protoreflect.Value, field protoreflect.FieldDescriptor) {
	t.Helper()
	if field.Kind() == protoreflect.MessageKind {
		sameMessage(t, generated.Elem(), independent.Message())
		return
	}
	want := reflect.ValueOf(independent.Interface()) // an enum is a number on both sides
	if got := generated.Convert(want.Type()); !reflect.DeepEqual(want.Interface(), got.Interface()) {
		t.Errorf("%s:\nwant %v\ngot  %v", field.FullName(), want, got)
	}
}

// protoName returns a field's name in the .proto file, from the field's struct tag.
func protoName(field reflect.StructField) string {
	for part := range strings.SplitSeq(field.Tag.Get("protobuf"), ",") {
		if name, ok := strings.CutPrefix(part, "name="); ok {
			return name
		}
	}
	return ""
}

func equal(t *testing.T, want, got any) {
	t.Helper()
	if !reflect.DeepEqual(want, got) {
		t.Errorf("want %+v\ngot  %+v", want, got)
	}
}
