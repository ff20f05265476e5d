package gogocodec_test

import (
	"bytes"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/gogocodec"
)

// An empty element takes two bytes on the wire, and a structure in memory.
func TestMessageOfEmptyElementsIsRefusedBeforeItIsDecoded(t *testing.T) {
	for name, wire := range map[string][]byte{
		"storages":       bytes.Repeat([]byte{5<<3 | 2, 0}, 100_000),
		"mounts in OCI":  append([]byte{6<<3 | 2, 0x80, 0x80, 0x04}, bytes.Repeat([]byte{5<<3 | 2, 0}, 1<<15)...),
		"cut in a field": append(bytes.Repeat([]byte{5<<3 | 2, 0}, 100_000), 5<<3|2, 9),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := proto.Unmarshal(wire, &agentpb.CreateContainerRequest{})
		runtime.ReadMemStats(&after)
		if err == nil || !strings.Contains(err.Error(), "when they are decoded") {
			t.Errorf("%s: %v", name, err)
		}
		if took := after.TotalAlloc - before.TotalAlloc; took > 1<<20 {
			t.Errorf("%s took %d bytes to be refused", name, took)
		}
	}
}

func TestOrdinaryMessagesAreFarFromTheBound(t *testing.T) {
	m := &agentpb.CreateContainerRequest{ContainerId: "c", OCI: &agentpb.Spec{Annotations: map[string]string{}, Process: &agentpb.Process{}, Linux: &agentpb.Linux{Seccomp: &agentpb.LinuxSeccomp{}, Resources: &agentpb.LinuxResources{}}}}
	for range 1000 {
		m.OCI.Process.Env = append(m.OCI.Process.Env, "SERVICE_PORT=443")
		m.OCI.Process.Capabilities = &agentpb.LinuxCapabilities{Bounding: []string{"CAP_KILL"}}
		m.OCI.Mounts = append(m.OCI.Mounts, &agentpb.Mount{Destination: "/etc/hosts", Source: "/run/kata/hosts", Type: "bind", Options: []string{"rbind", "rprivate", "ro"}})
		m.OCI.Linux.Seccomp.Syscalls = append(m.OCI.Linux.Seccomp.Syscalls, &agentpb.LinuxSyscall{Names: []string{"accept4", "clock_gettime", "epoll_wait"}, Action: "SCMP_ACT_ALLOW"})
		m.Storages = append(m.Storages, &agentpb.Storage{Driver: "blk", Source: "02/01", Fstype: "ext4", MountPoint: "/run/kata-containers/sandbox/storage/MDIvMDE="})
		m.Devices = append(m.Devices, &agentpb.Device{Id: "02/01", Type: "blk", VmPath: "/dev/vda", ContainerPath: "/dev/data"})
	}
	wire, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if err := proto.Unmarshal(wire, &agentpb.CreateContainerRequest{}); err != nil {
		t.Error(err)
	}
}

// FuzzGrowth checks that no decoded message takes more memory than the bound, measured by the
// message's own structures.
func FuzzGrowth(f *testing.F) {
	f.Add(bytes.Repeat([]byte{5<<3 | 2, 0}, 1000))
	f.Add([]byte{6<<3 | 2, 4, 7<<3 | 2, 2, 1<<3 | 2, 0})
	f.Add([]byte{4<<3 | 2, 2, 0, 0})
	f.Fuzz(func(t *testing.T, wire []byte) {
		var m agentpb.CreateContainerRequest
		if err := proto.Unmarshal(wire, &m); err != nil {
			return
		}
		if size, limit := sizeOf(reflect.ValueOf(&m).Elem()), gogocodec.MaxGrowth*len(wire)+20<<10; size > limit {
			t.Errorf("%d bytes take %d, want at most %d", len(wire), size, limit)
		}
	})
}

// sizeOf returns the memory of a message's fields, as far as it can be measured.
func sizeOf(v reflect.Value) (size int) {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return 0
		}
		return int(v.Type().Elem().Size()) + sizeOf(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			size += sizeOf(v.Field(i))
		}
	case reflect.Slice:
		size = v.Cap() * int(v.Type().Elem().Size())
		for i := range v.Len() {
			size += sizeOf(v.Index(i))
		}
	case reflect.Map:
		for key, value := range v.Seq2() {
			size += 32 + sizeOf(key) + sizeOf(value)
		}
	case reflect.String:
		return v.Len()
	}
	return size
}
