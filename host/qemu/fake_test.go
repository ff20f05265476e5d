package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/qmp"
	"github.com/directvol/directvol/host/registry"
)

// longEnough limits steps that must succeed; no test waits for it to pass.
const longEnough = time.Minute

func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), longEnough)
	t.Cleanup(cancel)
	return ctx
}

// fakeQEMU speaks QMP and keeps nodes and devices by name. It has no machine.
type fakeQEMU struct {
	mu       sync.Mutex
	conn     net.Conn
	commands []string // received commands, in order
	nodes    map[string]bool
	files    map[string]string // the node below a node, or its filename
	sets     map[int]*os.File  // sets of descriptors, of one descriptor each
	received []*os.File        // files that no command has used yet
	devices  map[string]bool
	drives   map[string]string // the node that each device uses
	leaving  map[string]bool   // devices that the guest was asked to release
	// hook, if set, sees each command first. If it returns answered = true, its result is the
	// answer.
	hook func(command string, arguments json.RawMessage) (result any, err *qmp.Error, answered bool)
	// guestLetsGo is true if the guest obeys unplug requests.
	guestLetsGo bool
}

func newFakeQEMU() *fakeQEMU {
	return &fakeQEMU{
		nodes: make(map[string]bool), files: make(map[string]string), devices: make(map[string]bool), drives: make(map[string]string), sets: make(map[int]*os.File), leaving: make(map[string]bool), guestLetsGo: true,
	}
}

// serve plays QEMU's side of successive connections.
func (q *fakeQEMU) serve(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		q.converse(conn.(*net.UnixConn))
		conn.Close()
		q.with(q.hungUp)
	}
}

// converse plays QEMU's side of one connection.
func (q *fakeQEMU) converse(conn *net.UnixConn) {
	q.mu.Lock()
	q.conn = conn
	q.mu.Unlock()
	fmt.Fprintln(conn, `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": []}}`)
	lines := json.NewDecoder(&withFiles{conn, q}) // a command starts at its closing brace, as in QEMU
	for {
		var cmd struct {
			Execute   string
			Arguments json.RawMessage
			ID        uint64
		}
		if lines.Decode(&cmd) != nil {
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

// withFiles reads a connection and collects the files passed with the bytes.
type withFiles struct {
	conn *net.UnixConn
	q    *fakeQEMU
}

func (f *withFiles) Read(b []byte) (int, error) {
	n, files, err := readWithFiles(f.conn, b)
	f.q.with(func() { f.q.received = append(f.q.received, files...) })
	return n, err
}

// readWithFiles reads from a socket, with the files passed along (SCM_RIGHTS).
func readWithFiles(conn *net.UnixConn, b []byte) (n int, files []*os.File, err error) {
	rights := make([]byte, unix.CmsgSpace(4*16))
	n, m, _, _, err := conn.ReadMsgUnix(b, rights)
	if n == 0 && err == nil {
		err = io.EOF
	}
	messages, _ := unix.ParseSocketControlMessage(rights[:max(m, 0)])
	for _, message := range messages {
		fds, _ := unix.ParseUnixRights(&message)
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return max(n, 0), files, err
}

// hungUp does what QEMU does when its only client disconnects: it drops the sets that no node uses
// (monitor_fdset_cleanup in monitor/misc.c), and the files of commands that did not arrive.
func (q *fakeQEMU) hungUp() {
	for _, file := range q.received {
		file.Close()
	}
	q.received = nil
	for id, file := range q.sets {
		if !slices.Contains(slices.Collect(maps.Values(q.files)), setName(id)) {
			file.Close()
			delete(q.sets, id)
		}
	}
}

func setName(id int) string { return fmt.Sprintf("/dev/fdset/%d", id) }

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
		Set      int `json:"fdset-id"`
	}
	json.Unmarshal(arguments, &a)
	switch command {
	case "blockdev-add":
		return q.blockdevAdd(a.NodeName, a.File, a.Filename)
	case "blockdev-del":
		return q.blockdevDel(a.NodeName)
	case "device_add":
		if q.devices[a.ID] {
			return nil, &qmp.Error{Class: "GenericError", Desc: "Duplicate device ID '" + a.ID + "'"}
		}
		q.devices[a.ID], q.drives[a.ID] = true, a.Drive
	case "device_del":
		return q.deviceDel(a.ID)
	case "block_resize":
		return q.blockResize(a.NodeName, a.Size)
	case "query-blockstats":
		nodes := []any{}
		for name := range q.nodes {
			nodes = append(nodes, map[string]any{"node-name": name, "stats": map[string]any{}})
		}
		return nodes, nil
	case "query-status":
		return map[string]string{"status": "running"}, nil
	case "qom-list":
		devices := []any{}
		for id := range q.devices {
			devices = append(devices, map[string]string{"name": id, "type": "child<virtio-blk-pci>"})
		}
		return devices, nil
	case "add-fd", "remove-fd", "query-fdsets":
		return q.fdset(command, a.Set)
	}
	return struct{}{}, nil
}

func (q *fakeQEMU) fdset(command string, id int) (any, *qmp.Error) {
	switch {
	case command == "query-fdsets":
		sets := []any{}
		for id := range q.sets {
			sets = append(sets, map[string]any{"fdset-id": id, "fds": []any{}})
		}
		return sets, nil
	case command == "add-fd" && len(q.received) == 0:
		return nil, &qmp.Error{Class: "GenericError", Desc: "No file descriptor supplied via SCM_RIGHTS"}
	case command == "add-fd":
		q.sets[id], q.received = q.received[0], q.received[1:]
		return map[string]int{"fdset-id": id, "fd": 7}, nil
	case q.sets[id] == nil:
		return nil, &qmp.Error{Class: "GenericError", Desc: fmt.Sprintf("File descriptor named 'fdset-id:%d' not found", id)}
	}
	q.sets[id].Close()
	delete(q.sets, id)
	return struct{}{}, nil
}

func (q *fakeQEMU) blockdevAdd(name, file, filename string) (any, *qmp.Error) {
	if q.nodes[name] {
		return nil, &qmp.Error{Class: "GenericError", Desc: "Duplicate nodes with node-name='" + name + "'"}
	}
	err := errors.New("No such file or directory")
	if filename == "" && !q.nodes[file] {
		return nil, &qmp.Error{Class: "GenericError", Desc: "Cannot find device='' nor node-name='" + file + "'"}
	}
	if id := 0; strings.HasPrefix(filename, "/dev/fdset/") {
		fmt.Sscanf(filename, "/dev/fdset/%d", &id)
		if q.sets[id] != nil {
			_, err = q.sets[id].Stat()
		}
	} else if filename != "" {
		_, err = os.Stat(filename)
	}
	if filename != "" {
		if err != nil {
			return nil, &qmp.Error{Class: "GenericError", Desc: "Could not open '" + filename + "': " + err.Error()}
		}
		file = filename
	}
	q.nodes[name], q.files[name] = true, file
	return struct{}{}, nil
}

// blockResize makes the store of a raw node larger or smaller.
func (q *fakeQEMU) blockResize(raw string, bytes uint64) (any, *qmp.Error) {
	for id, file := range q.sets {
		if setName(id) != q.files[q.files[raw]] {
			continue
		}
		if err := file.Truncate(int64(bytes)); err != nil {
			return nil, &qmp.Error{Class: "GenericError", Desc: "Failed to resize file: " + err.Error()}
		}
		return struct{}{}, nil
	}
	return nil, &qmp.Error{Class: "GenericError", Desc: "Cannot find device='' nor node-name='" + raw + "'"}
}

func (q *fakeQEMU) blockdevDel(name string) (any, *qmp.Error) {
	if !q.nodes[name] {
		return nil, &qmp.Error{Class: "GenericError", Desc: "Failed to find node with node-name='" + name + "'"}
	}
	for _, file := range q.files {
		if file == name {
			return nil, &qmp.Error{Class: "GenericError", Desc: "Node " + name + " is in use"}
		}
	}
	for device := range q.devices {
		if q.drives[device] == name {
			return nil, &qmp.Error{Class: "GenericError", Desc: "Node " + name + " is in use"}
		}
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

// letGo makes the guest release a device.
func (q *fakeQEMU) letGo(id string) {
	delete(q.devices, id)
	delete(q.leaving, id)
	q.event("DEVICE_DELETED", `{"path": "/machine/peripheral/%s/virtio-backend"}`, id)
	q.event("DEVICE_DELETED", `{"device": "some-other", "path": "/machine/peripheral/some-other"}`)
	q.event("DEVICE_DELETED", `{"device": "%s", "path": "/machine/peripheral/%s"}`, id, id)
}

// deviceOf returns the name of a disk's device.
func deviceOf(vm *VM, id string) string { return vm.disks.find(id).device() }

// event sends an event with a timestamp in the past, because the host's clock may be set back at
// any time.
func (q *fakeQEMU) event(name, data string, args ...any) {
	fmt.Fprintf(q.conn, `{"event": "%s", "data": %s, "timestamp": {"seconds": 1700000000, "microseconds": 1}}`+"\n", name, fmt.Sprintf(data, args...))
}

// with runs f while the fake handles no command, so that f may read and change it.
func (q *fakeQEMU) with(f func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	f()
}

// answerBy sets the hook.
func (q *fakeQEMU) answerBy(hook func(command string, arguments json.RawMessage) (result any, err *qmp.Error, answered bool)) {
	q.with(func() { q.hook = hook })
}

// listenFake returns a fake QEMU in this process, and its socket.
func listenFake(t *testing.T) (*fakeQEMU, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qmp.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	q := newFakeQEMU()
	go q.serve(l)
	return q, path
}

// fakeVM returns a VM whose QEMU is a fake in this process.
func fakeVM(t *testing.T) (*VM, *fakeQEMU) {
	t.Helper()
	q, path := listenFake(t)
	return vmOn(t, path), q
}

// vmOn returns a VM whose QEMU answers at path.
func vmOn(t *testing.T, path string) *VM {
	t.Helper()
	log := logrus.New()
	log.SetOutput(io.Discard)
	vm := &VM{disks: newDiskTable(2, testStores(t), "the test"), qemu: endedProcess(t), log: logrus.NewEntry(log), try: func(context.Context, *disk) error { return nil }}
	vm.hotplug = newHotplug(vm.requestAgain)
	client, err := qmp.Dial(limited(t), path, vm.settle)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	vm.qmp, vm.major = client, client.Version().Major
	go vm.watchDisks(client.Subscribe(diskEvents...))
	return vm
}

// endedProcess returns a process that has exited with status 0 but is not yet recorded as ended.
func endedProcess(t *testing.T) *process {
	t.Helper()
	cmd, err := ranTrue()
	must(t, err)
	return &process{name: "QEMU", said: &tail{}, cmd: cmd, done: make(chan struct{})}
}

// ranTrue runs true(1) once: starting a process is the main cost of a fake.
var ranTrue = sync.OnceValues(func() (*exec.Cmd, error) {
	cmd := exec.Command("true")
	return cmd, cmd.Run()
})

// testStores is a registry of the test's own.
func testStores(t *testing.T) *registry.Stores {
	return registry.In(filepath.Join(t.TempDir(), "stores"))
}

// image makes an image file of the given size for a disk.
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
