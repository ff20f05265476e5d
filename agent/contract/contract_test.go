package contract

import (
	"flag"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/protocols/agentpb"
)

var update = flag.Bool("update", false, "write docs/messages.md")

// TestEveryFieldIsHonouredOrRefusedOrIgnored walks the message types: a new field makes the test
// fail until the list has an entry for it.
func TestEveryFieldIsHonouredOrRefusedOrIgnored(t *testing.T) {
	seen := map[string]bool{}
	for _, message := range []any{&agentpb.CreateSandboxRequest{}, &agentpb.CreateContainerRequest{}, &agentpb.RemoveContainerRequest{}, &agentpb.Storage{}} {
		walk(t, reflect.TypeOf(message).Elem(), seen)
	}
	for _, m := range fields {
		for _, f := range m.fields {
			if name := m.message + "." + f.name; !seen[name] {
				t.Errorf("%s: the list has it, and no message does", name)
			} else if delete(seen, name); f.why == "" || strings.Contains(f.why, "|") {
				t.Errorf("%s: why %s is %q", name, f.verdict, f.why)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(seen)) {
		t.Errorf("%s: the list does not have it once", name)
	}
}

// walk sets each field of a message alone, and descends into fields that are honoured.
func walk(t *testing.T, message reflect.Type, seen map[string]bool) {
	for i := range message.NumField() {
		name := nameOf(message.Field(i))
		if name == "" || seen[message.Name()+"."+name] {
			continue
		}
		seen[message.Name()+"."+name] = true
		m := reflect.New(message)
		set(m.Elem().Field(i))
		err := Check(m.Interface())
		switch verdict := of(message.Name(), name).verdict; {
		case verdict == refused && (errkind.Of(err) != errkind.Unimplemented || !strings.HasPrefix(err.Error(), name+": ")):
			t.Errorf("%s.%s\nwant it refused by its name\ngot  %v", message.Name(), name, err)
		case verdict != refused && err != nil:
			t.Errorf("%s.%s is %s\ngot  %v", message.Name(), name, verdict, err)
		case verdict == honoured:
			if of := elem(message.Field(i).Type); of.Kind() == reflect.Struct {
				walk(t, of, seen)
			}
		}
	}
}

// set gives a field a non-zero value that is as small as possible.
func set(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint32:
		v.SetUint(1)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		set(v.Index(0))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf("x"), reflect.ValueOf("x"))
	default:
		panic(v.Type())
	}
}

func elem(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Slice || t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t
}

func TestRefusalNamesThePathOfItsField(t *testing.T) {
	err := Check(&agentpb.CreateContainerRequest{Storages: []*agentpb.Storage{{}, {FsGroup: &agentpb.FSGroup{}}}})
	if err == nil || !strings.HasPrefix(err.Error(), "storages[1].fs_group: ") {
		t.Errorf("got %v", err)
	}
}

// A field that is in no list is refused, as a field of a later Kata would be.
func TestUnknownFieldIsRefused(t *testing.T) {
	type Later struct {
		Field string `protobuf:"bytes,1,opt,name=field,proto3"`
	}
	if err := Check(&Later{"x"}); errkind.Of(err) != errkind.Unimplemented || !strings.Contains(err.Error(), "field") {
		t.Errorf("got %v", err)
	}
}

// The messages have the fields that Kata's runtime sends with every sandbox and container.
func TestFieldsThatKataAlwaysSendsAreAccepted(t *testing.T) {
	for _, message := range []any{
		&agentpb.CreateSandboxRequest{Hostname: "pod", Dns: []string{"nameserver 10.0.0.10"}, SandboxId: "s", Storages: []*agentpb.Storage{
			{Driver: "virtio-fs", Source: "kataShared", Fstype: "virtiofs", MountPoint: "/run/kata-containers/shared/containers/"},
			{Driver: "ephemeral", Source: "shm", Fstype: "tmpfs", MountPoint: "/run/kata-containers/sandbox/shm", Options: []string{"noexec", "nosuid", "nodev", "mode=1777", "size=67108864"}}}},
		&agentpb.CreateContainerRequest{ContainerId: "c", ExecId: "c", Devices: []*agentpb.Device{{Id: "02/01", Type: "blk", VmPath: "/dev/vda", ContainerPath: "/dev/data"}}, OCI: &agentpb.Spec{
			Version: "1.1.0", Process: &agentpb.Process{Args: []string{"sh"}, Cwd: "/"}, Root: &agentpb.Root{Path: "/run/kata-containers/c/rootfs"}, Hostname: "pod",
			Mounts: []*agentpb.Mount{{Destination: "/proc", Type: "proc"}}, Annotations: map[string]string{"io.kubernetes.cri.container-type": "sandbox"}, Linux: &agentpb.Linux{CgroupsPath: "/c"}}},
	} {
		if err := Check(message); err != nil {
			t.Errorf("%T: %v", message, err)
		}
	}
}

func TestListIsDocumented(t *testing.T) {
	const file = "../../docs/messages.md"
	if *update {
		if err := os.WriteFile(file, []byte(Text()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != Text() {
		t.Errorf("%s is not what the list says (error %v): run go test ./agent/contract -update", file, err)
	}
}
