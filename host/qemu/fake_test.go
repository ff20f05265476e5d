package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/host/qmp"
)

// longEnough limits what must happen; nothing waits for it to pass.
const longEnough = time.Minute

func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), longEnough)
	t.Cleanup(cancel)
	return ctx
}

// fakeQEMU speaks QMP and keeps nodes and devices by name, with no machine behind.
type fakeQEMU struct {
	mu       sync.Mutex
	conn     net.Conn
	commands []string          // what came in, in order
	nodes    map[string]uint64 // virtual sizes
	files    map[string]string // what a node is above
	devices  map[string]bool
	leaving  map[string]bool // devices that the guest was asked to let go of
	// hook may answer a command first, where it says that it does.
	hook func(command string, arguments json.RawMessage) (result any, err *qmp.Error, answered bool)
	// guestLetsGo says whether an unplug request is obeyed.
	guestLetsGo bool
}

func newFakeQEMU() *fakeQEMU {
	return &fakeQEMU{
		nodes: make(map[string]uint64), files: make(map[string]string), devices: make(map[string]bool), leaving: make(map[string]bool), guestLetsGo: true,
	}
}

// serve plays QEMU's side of one connection.
func (q *fakeQEMU) serve(l net.Listener) {
	conn, err := l.Accept()
	if err != nil {
		return
	}
	q.mu.Lock()
	q.conn = conn
	q.mu.Unlock()
	fmt.Fprintln(conn, `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": []}}`)
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		var cmd struct {
			Execute   string
			Arguments json.RawMessage
			ID        uint64
		}
		if json.Unmarshal(lines.Bytes(), &cmd) != nil {
			return
		}
		q.mu.Lock()
		result, qerr := q.run(cmd.Execute, cmd.Arguments)
		answer := map[string]any{"id": cmd.ID, "return": result}
		if qerr != nil {
			answer = map[string]any{"id": cmd.ID, "error": qerr}
		}
		json.NewEncoder(conn).Encode(answer)
		q.mu.Unlock()
	}
}

func (q *fakeQEMU) run(command string, arguments json.RawMessage) (any, *qmp.Error) {
	q.commands = append(q.commands, command)
	if q.hook != nil {
		if result, err, answered := q.hook(command, arguments); answered {
			return result, err
		}
	}
	var a struct {
		ID       string `json:"id"`
		NodeName string `json:"node-name"`
		Filename string
		File     string
		Drive    string
		Size     uint64
	}
	json.Unmarshal(arguments, &a)
	switch command {
	case "blockdev-add":
		size := q.nodes[a.File]
		if info, err := os.Stat(a.Filename); err == nil {
			size = uint64(info.Size())
		}
		q.nodes[a.NodeName], q.files[a.NodeName] = size, a.File
	case "blockdev-del":
		return q.blockdevDel(a.NodeName)
	case "device_add":
		q.devices[a.ID] = true
	case "device_del":
		return q.deviceDel(a.ID)
	case "block_resize":
		q.nodes[a.NodeName] = a.Size
	case "qom-list":
		devices := []any{}
		for id := range q.devices {
			devices = append(devices, map[string]any{"name": id})
		}
		return devices, nil
	case "query-named-block-nodes":
		nodes := []any{}
		for name, size := range q.nodes {
			nodes = append(nodes, map[string]any{"node-name": name, "image": map[string]any{"virtual-size": size}})
		}
		return nodes, nil
	}
	return struct{}{}, nil
}

func (q *fakeQEMU) blockdevDel(name string) (any, *qmp.Error) {
	if _, ok := q.nodes[name]; !ok {
		return nil, &qmp.Error{Class: "GenericError", Desc: "Failed to find node with node-name='" + name + "'"}
	}
	for _, file := range q.files {
		if file == name {
			return nil, &qmp.Error{Class: "GenericError", Desc: "Node " + name + " is in use"}
		}
	}
	if len(name) > len("drive-") && q.devices[DeviceID(name[len("drive-"):])] {
		return nil, &qmp.Error{Class: "GenericError", Desc: "Node " + name + " is in use"}
	}
	delete(q.nodes, name)
	delete(q.files, name)
	return struct{}{}, nil
}

func (q *fakeQEMU) deviceDel(id string) (any, *qmp.Error) {
	switch {
	case !q.devices[id]:
		return nil, &qmp.Error{Class: qmp.DeviceNotFound, Desc: "Device '" + id + "' not found"}
	case q.leaving[id]:
		return nil, &qmp.Error{Class: "GenericError", Desc: "Device " + id + " is already in the process of unplug"}
	}
	q.leaving[id] = true
	if q.guestLetsGo {
		q.letGo(id)
	}
	return struct{}{}, nil
}

// letGo is the guest letting go of a device.
func (q *fakeQEMU) letGo(id string) {
	delete(q.devices, id)
	delete(q.leaving, id)
	q.event("DEVICE_DELETED", `{"path": "/machine/peripheral/%s/virtio-backend"}`, id)
	q.event("DEVICE_DELETED", `{"device": "some-other", "path": "/machine/peripheral/some-other"}`)
	q.event("DEVICE_DELETED", `{"device": "%s", "path": "/machine/peripheral/%s"}`, id, id)
}

func (q *fakeQEMU) event(name, data string, args ...any) {
	now := time.Now()
	fmt.Fprintf(q.conn, `{"event": "%s", "data": %s, "timestamp": {"seconds": %d, "microseconds": %d}}`+"\n", name, fmt.Sprintf(data, args...), now.Unix(), now.Nanosecond()/1000+1)
}

// with changes or reads the fake while it is at rest.
func (q *fakeQEMU) with(f func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	f()
}

// fakeVM returns a VM whose QEMU is a fake in this process.
func fakeVM(t *testing.T) (*VM, *fakeQEMU) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qmp.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	q := newFakeQEMU()
	go q.serve(l)
	client, err := qmp.Dial(limited(t), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	log := logrus.New()
	log.SetOutput(io.Discard)
	vm := &VM{log: logrus.NewEntry(log), disks: newDiskTable(2), hotplug: newHotplug(), qmp: client, qemu: &process{done: make(chan struct{})}}
	go vm.watchDisks(client.Subscribe(diskEvents...).Events())
	return vm, q
}

// image makes a file to be a disk.
func image(t *testing.T, size int64) string {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "disk.img"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f.Name()
}
