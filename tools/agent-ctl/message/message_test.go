package message

import (
	"bytes"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/bufbuild/protocompile"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
)

// everyMessage returns a constructor of each message that a method takes or returns, by the
// message's name in Go.
func everyMessage() map[string]func() proto.Message {
	all := map[string]func() proto.Message{}
	for _, m := range slices.Concat(agentpb.Methods(), volumepb.Methods()) {
		for _, create := range []func() proto.Message{m.NewRequest, m.NewResponse} {
			all[reflect.TypeOf(create()).Elem().Name()] = create
		}
	}
	return all
}

// fill sets every field of a value to something other than its default.
func fill(v reflect.Value) {
	switch t := v.Type(); {
	case t == bytesType:
		v.SetBytes([]byte{0, 0xff, '"'})
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(t, 2, 2))
		fill(v.Index(0))
		fill(v.Index(1))
	case v.Kind() == reflect.Map:
		v.Set(reflect.MakeMap(t))
		for _, key := range []string{"", "a \"b\" <c>\n"} {
			element := reflect.New(t.Elem()).Elem()
			fill(element)
			v.SetMapIndex(reflect.ValueOf(key), element)
		}
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(t.Elem()))
		for _, f := range fieldsOf(t.Elem()) {
			fill(v.Elem().FieldByIndex(f.Index))
		}
	case v.Kind() == reflect.String:
		v.SetString("é \x01 <&> \u2028 \\")
	case v.Kind() == reflect.Bool:
		v.SetBool(true)
	case enums[t] != nil:
		v.SetInt(1)
	case v.CanInt():
		v.SetInt(-1 << (t.Bits() - 1))
	case v.CanUint():
		v.SetUint(1<<t.Bits() - 1)
	default:
		panic("no value for " + t.String())
	}
}

func filled(create func() proto.Message) proto.Message {
	m := reflect.New(reflect.TypeOf(create())).Elem()
	fill(m)
	return m.Interface().(proto.Message)
}

// descriptors compiles the .proto files and returns their descriptors: an authority that this
// package does not use.
func descriptors(t *testing.T) map[string]protoreflect.MessageDescriptor {
	t.Helper()
	compiler := protocompile.Compiler{Resolver: protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{"../../../protocols/proto"}})}
	files, err := compiler.Compile(t.Context(), "agent.proto", "health.proto", "volume.proto", "google/protobuf/empty.proto", "types.proto")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]protoreflect.MessageDescriptor{}
	for _, file := range files {
		for i := range file.Messages().Len() {
			m := file.Messages().Get(i)
			all[string(m.Name())] = m
		}
		for i := range file.Imports().Len() {
			imported := file.Imports().Get(i).Messages()
			for j := range imported.Len() {
				all[string(imported.Get(j).Name())] = imported.Get(j)
			}
		}
	}
	return all
}

func TestJSONIsWhatProtobufItselfReads(t *testing.T) {
	known := descriptors(t)
	for name, create := range everyMessage() {
		for state, m := range map[string]proto.Message{"empty": create(), "filled": filled(create)} {
			wire, err := proto.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			want, got := dynamicpb.NewMessage(known[name]), dynamicpb.NewMessage(known[name])
			if err := proto.Unmarshal(wire, want); err != nil {
				t.Fatal(err)
			}
			text := JSON(m)
			if err := protojson.Unmarshal(text, got); err != nil {
				t.Errorf("%s %s: %v: %s", state, name, err, text)
			} else if !proto.Equal(want, got) {
				t.Errorf("%s %s\nwant %v\ngot  %v", state, name, want, got)
			}
		}
	}
}

func TestDecodeReadsWhatProtobufItselfWrites(t *testing.T) {
	known := descriptors(t)
	for name, create := range everyMessage() {
		want := filled(create)
		wire, err := proto.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		independent := dynamicpb.NewMessage(known[name])
		if err := proto.Unmarshal(wire, independent); err != nil {
			t.Fatal(err)
		}
		for _, numbers := range []bool{false, true} {
			text, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true, UseEnumNumbers: numbers}.Marshal(independent)
			if err != nil {
				t.Fatal(err)
			}
			got := create()
			if err := Decode(text, got); err != nil {
				t.Errorf("%s: %v: %s", name, err, text)
			} else if want, got := string(JSON(want)), string(JSON(got)); want != got {
				t.Errorf("%s\nwant %s\ngot  %s", name, want, got)
			}
		}
	}
}

func TestDescriptionsAreTheProtosOwn(t *testing.T) {
	known := descriptors(t)
	described := 0
	for name, create := range everyMessage() {
		for _, d := range Describe(create()) {
			fields := known[d.Name].Fields()
			if len(d.Fields) != fields.Len() {
				t.Errorf("%s in %s\nwant %d fields\ngot  %v", d.Name, name, fields.Len(), d.Fields)
				continue
			}
			for i, got := range d.Fields {
				described++
				if want := (Field{string(fields.Get(i).Name()), protoType(fields.Get(i))}); want != got {
					t.Errorf("%s\nwant %v\ngot  %v", d.Name, want, got)
				}
			}
		}
	}
	if described == 0 {
		t.Error("no field was looked at")
	}
}

// protoType returns a type from its descriptor, in the form of Field.Type.
func protoType(f protoreflect.FieldDescriptor) string {
	name := f.Kind().String()
	switch {
	case f.IsMap():
		return "map<" + protoType(f.MapKey()) + ", " + protoType(f.MapValue()) + ">"
	case f.Message() != nil:
		name = string(f.Message().Name())
	case f.Enum() != nil:
		var names []string
		for i := range f.Enum().Values().Len() {
			names = append(names, string(f.Enum().Values().Get(i).Name()))
		}
		name = strings.Join(names, "|")
	}
	if f.IsList() {
		return "repeated " + name
	}
	return name
}

func TestTextShowsEveryFieldAndNoControlCharacter(t *testing.T) {
	for name, create := range everyMessage() {
		m := filled(create)
		text := Text(m, "  ")
		for _, f := range Describe(m)[0].Fields {
			if !strings.Contains(text, "  "+f.Name) {
				t.Errorf("%s: no %s in\n%s", name, f.Name, text)
			}
		}
		for line := range strings.Lines(text) {
			if strings.ContainsFunc(strings.TrimSuffix(line, "\n"), func(r rune) bool { return r < ' ' }) || !strings.HasPrefix(line, "  ") {
				t.Errorf("%s: %q", name, line)
			}
		}
	}
}

// A terminal takes U+009B as ESC [; the other two hide or turn what follows.
func TestJSONShowsNoControlCharacterRaw(t *testing.T) {
	text := "a\x1b[2J\u009b2J\x7f\u202e\U000e0041\xff é 日"
	line := JSON(&agentpb.Metrics{Metrics: text})
	if want := `{"metrics":"a\u001b[2J\u009b2J\u007f\u202e\udb40\udc41\ufffd é 日"}`; string(line) != want {
		t.Errorf("want %s\ngot  %s", want, line)
	}
	var read agentpb.Metrics
	if err := Decode(line, &read); err != nil || read.Metrics != strings.ToValidUTF8(text, "\ufffd") {
		t.Errorf("read again\nwant %q\ngot  %q, %v", text, read.Metrics, err)
	}
}

func TestTextIsOutlined(t *testing.T) {
	got := Text(&agentpb.GuestDetailsResponse{
		MemBlockSizeBytes: 134217728,
		AgentDetails:      &agentpb.AgentDetails{Version: "1.2", DeviceHandlers: []string{"blk", "scsi"}},
	}, "")
	want := `mem_block_size_bytes: 134217728
agent_details:
  version: 1.2
  init_daemon: false
  device_handlers: blk, scsi
  supports_seccomp: false
support_mem_hotplug_probe: false
`
	if want != got {
		t.Errorf("\nwant %s\ngot  %s", want, got)
	}
}

func TestNamesAreReadInAnyCase(t *testing.T) {
	got := &agentpb.CreateContainerRequest{}
	err := Decode([]byte(`{"oci":{"version":"1.2.0","process":{"noNewPrivileges":true}},"Container_ID":"c","storages":[{"fs_group":{"group_change_policy":"onrootmismatch"}}]}`), got)
	if err != nil {
		t.Fatal(err)
	}
	if got.OCI.Version != "1.2.0" || !got.OCI.Process.NoNewPrivileges || got.ContainerId != "c" || got.Storages[0].FsGroup.GroupChangePolicy != 1 {
		t.Errorf("got %s", JSON(got))
	}
}

func TestUnknownEnumNumberStaysANumber(t *testing.T) {
	m := &agentpb.HealthCheckResponse{Status: 7}
	if want, got := `{"status":7}`, string(JSON(m)); want != got {
		t.Errorf("JSON\nwant %s\ngot  %s", want, got)
	}
	if want, got := "status: 7\n", Text(m, ""); want != got {
		t.Errorf("text\nwant %s\ngot  %s", want, got)
	}
}

func TestWrongRequestIsRefusedByTheNameOfItsField(t *testing.T) {
	for text, says := range map[string]string{
		``:                   "request: unexpected EOF",
		`{`:                  "request: unexpected EOF",
		`{} {}`:              "request: more text",
		`null`:               "request: want CreateContainerRequest, got null",
		`[]`:                 "request: want CreateContainerRequest, got a list",
		`{"container":"c"}`:  `request: unknown field "container": CreateContainerRequest has container_id, exec_id, `,
		`{"container_id":1}`: "request.container_id: want string, got a number",
		`{"container_id":"a","Container_id":"b"}`:                     "request.container_id: given twice",
		`{"sandbox_pidns":"true"}`:                                    "request.sandbox_pidns: want bool, got a string",
		`{"stdin_port":-1}`:                                           `request.stdin_port: "-1" is no uint32`,
		`{"stdin_port":4294967296}`:                                   `request.stdin_port: "4294967296" is no uint32`,
		`{"stdin_port":1.5}`:                                          `request.stdin_port: "1.5" is no uint32`,
		`{"stdin_port":""}`:                                           `request.stdin_port: want uint32, got a string`,
		`{"stdin_port":true}`:                                         `request.stdin_port: want uint32, got true`,
		`{"storages":{}}`:                                             "request.storages: want repeated Storage, got an object",
		`{"storages":[{},null]}`:                                      "request.storages[1]: want Storage, got null",
		`{"storages":[{},{"options":["a",{}]}]}`:                      "request.storages[1].options[1]: want string, got an object",
		`{"storages":[{"fs_group":{"group":1}}]}`:                     `request.storages[0].fs_group: unknown field "group": FSGroup has group_id, group_change_policy`,
		`{"OCI":{"Annotations":{"a":null}}}`:                          `request.OCI.Annotations["a"]: want string, got null`,
		`{"OCI":{"Annotations":{"a":"b","a":"c"}}}`:                   `request.OCI.Annotations["a"]: given twice`,
		`{"OCI":{"Annotations":[]}}`:                                  `request.OCI.Annotations: want map<string, string>, got a list`,
		`{"storages":[{"fs_group":{"group_change_policy":"Never"}}]}`: `group_change_policy: "Never" is none of Always|OnRootMismatch`,
		`{"storages":[{"fs_group":{"group_change_policy":true}}]}`:    `group_change_policy: want int32, got true`,
	} {
		err := Decode([]byte(text), &agentpb.CreateContainerRequest{})
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s\nwant %s\ngot  %v", text, says, err)
		}
	}
	if err := Decode([]byte(`{"data":"?"}`), &agentpb.WriteStreamRequest{}); err == nil || !strings.Contains(err.Error(), "request.data: illegal base64") {
		t.Errorf("bytes: %v", err)
	}
	if err := Decode([]byte(`{"a":1}`), &agentpb.ListRoutesRequest{}); err == nil || !strings.Contains(err.Error(), "ListRoutesRequest has none") {
		t.Errorf("a message without fields: %v", err)
	}
}

// A message that Decode accepts fits the wire, and Decode accepts JSON's output for it.
func FuzzDecode(f *testing.F) {
	for _, create := range everyMessage() {
		f.Add(JSON(filled(create)))
	}
	f.Add([]byte(`{"volume_guest_path":"/a","size":"18446744073709551615"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		for name, create := range everyMessage() {
			m := create()
			if Decode(text, m) != nil {
				continue
			}
			if _, err := proto.Marshal(m); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			again := create()
			if err := Decode(JSON(m), again); err != nil || !bytes.Equal(JSON(m), JSON(again)) {
				t.Errorf("%s\nwant %s\ngot  %s (%v)", name, JSON(m), JSON(again), err)
			}
			_ = Text(m, "")
		}
	})
}
