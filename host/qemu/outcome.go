package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/directvol/directvol/host/qmp"
)

// maxCuts is how often one interrupted command is resumed on a new connection before its outcome is
// reported as unknown.
const maxCuts = 10

// running is the run state of a machine that is not paused.
const running = "running"

// state is what QEMU reports of itself.
type state struct {
	run     string          // the run state, one of RunState in qapi/run-state.json
	nodes   map[string]bool // block nodes, by their names
	devices map[string]bool // devices, by their ids
	sets    map[int]bool    // sets of descriptors (add-fd), by their numbers
}

// askState asks QEMU for its state.
func askState(ctx context.Context, ask qmp.Ask) (state, error) {
	s := state{nodes: make(map[string]bool), devices: make(map[string]bool), sets: make(map[int]bool)}
	var status struct {
		Status string `json:"status"`
	}
	if err := ask(ctx, "query-status", nil, &status); err != nil {
		return state{}, err
	}
	s.run = status.Status
	var nodes []struct {
		NodeName string `json:"node-name"`
	}
	// Every other query that lists the nodes asks each store for its size, in QEMU's main loop: a
	// store that hangs would stop the VM.
	if err := ask(ctx, "query-blockstats", map[string]bool{"query-nodes": true}, &nodes); err != nil {
		return state{}, err
	}
	for _, node := range nodes {
		s.nodes[node.NodeName] = true
	}
	var devices []struct {
		Name string `json:"name"`
		Type string `json:"type"`
	}
	// /machine/peripheral holds the devices with an id (qdev_set_id in softmmu/qdev-monitor.c).
	if err := ask(ctx, "qom-list", map[string]string{"path": "/machine/peripheral"}, &devices); err != nil {
		return state{}, err
	}
	for _, device := range devices {
		if strings.HasPrefix(device.Type, "child<") { // other entries are properties of the container itself
			s.devices[device.Name] = true
		}
	}
	var sets []struct {
		ID int `json:"fdset-id"`
	}
	if err := ask(ctx, "query-fdsets", nil, &sets); err != nil {
		return state{}, err
	}
	for _, set := range sets {
		s.sets[set.ID] = true
	}
	return s, nil
}

// state asks QEMU for its state. The error says so if QEMU has ended.
func (vm *VM) state(ctx context.Context) (state, error) {
	now, err := askState(ctx, vm.qmp.Execute)
	return now, vm.explained(ctx, err)
}

// settle reads QEMU's state on a new QMP connection, and records the devices that left while there
// was no connection. It returns an event for each, for subscribers with room in their buffers; the
// disks are updated even without the events.
func (vm *VM) settle(ctx context.Context, ask qmp.Ask) ([]qmp.Event, error) {
	now, missed, err := vm.whatHasLeft(ctx, ask)
	if err != nil {
		return nil, err
	}
	vm.log.Warnf("the QMP connection was lost and is restored: QEMU is %s and has %d block nodes and %d devices; %d disks have left meanwhile",
		now.run, len(now.nodes), len(now.devices), len(missed))
	return missed, nil
}

// whatHasLeft asks QEMU for its state, records the disks that have left unnoticed, and returns an
// event for each. It considers only disks that were plugged in before the query, because others may
// be attached meanwhile.
func (vm *VM) whatHasLeft(ctx context.Context, ask qmp.Ask) (now state, missed []qmp.Event, err error) {
	before := vm.disks.plugged()
	if now, err = askState(ctx, ask); err != nil {
		return state{}, nil, err
	}
	for _, d := range before {
		if !now.devices[d.device()] && vm.hasLeft(d) {
			data, err := json.Marshal(map[string]string{"device": d.device()})
			if err != nil {
				return state{}, nil, err
			}
			missed = append(missed, qmp.Event{Name: "DEVICE_DELETED", Data: data, Time: time.Now()})
		}
	}
	return now, missed, nil
}

// execute runs a QMP command as send does. If the command changes the graph of block nodes, but no
// disk that a guest has, execute waits as change does.
func (vm *VM) execute(ctx context.Context, command string, arguments, result any) error {
	if changesGraph[command] {
		if err := vm.awaitRequests(ctx, nil); err != nil {
			return err
		}
	}
	return vm.send(ctx, command, arguments, result)
}

// change runs a QMP command that changes a disk, as send does, unless the command would block QEMU:
// then it is not sent (ErrDiskHangs).
func (vm *VM) change(ctx context.Context, d *disk, command string, arguments any) error {
	if err := vm.awaitRequests(ctx, d); err != nil {
		return err
	}
	return vm.send(ctx, command, arguments, nil)
}

// send runs a QMP command. If the connection breaks, QEMU's state shows whether the command was
// carried out; if not, send sends it again. If the state does not show it, the error is
// qmp.ErrOutcomeUnknown. If QEMU has ended, the error says so.
func (vm *VM) send(ctx context.Context, command string, arguments, result any) error {
	return vm.explained(ctx, vm.decided(ctx, command, arguments, func() error { return vm.qmp.Execute(ctx, command, arguments, result) }))
}

// explained adds to err that QEMU has ended, if it has.
func (vm *VM) explained(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	select {
	case <-vm.qmp.Done():
		return vm.explain(ctx, err)
	default:
		return err
	}
}

// decided sends a command, again if necessary, until its outcome is known.
func (vm *VM) decided(ctx context.Context, command string, arguments any, send func() error) error {
	err := send()
	for range maxCuts {
		if !errors.Is(err, qmp.ErrOutcomeUnknown) || ctx.Err() != nil {
			return err
		}
		subject, parseErr := subjectOf(arguments)
		if parseErr != nil {
			return errors.Join(err, parseErr)
		}
		now, askErr := askState(ctx, vm.qmp.Execute)
		if askErr != nil {
			return fmt.Errorf("%w, and could not be asked: %w", err, askErr)
		}
		switch subject.outcome(command, now) {
		case carriedOut:
			return nil
		case unknown:
			return err
		}
		err = send()
		if answer := new(qmp.Error); command == "device_del" && errors.As(err, &answer) && answer.Class != qmp.DeviceNotFound {
			return nil // "already in the process of unplug": the first one was carried out
		}
	}
	return err
}

// subject holds the names in a command's arguments: the objects that the command changes.
type subject struct {
	Node   string `json:"node-name"`
	Device string `json:"id"`
	Set    int    `json:"fdset-id"`
}

func subjectOf(arguments any) (s subject, err error) {
	text, err := json.Marshal(arguments)
	if err == nil && arguments != nil {
		err = json.Unmarshal(text, &s)
	}
	return s, err
}

// outcome is the outcome of a command whose connection broke.
type outcome int

const (
	unknown    outcome = iota
	carriedOut         // the command has taken effect
	notYet             // the command was not carried out and may be sent again
)

// outcome infers from QEMU's present state whether a command was carried out.
func (s subject) outcome(command string, now state) outcome {
	done := false
	switch command {
	case "blockdev-add":
		done = now.nodes[s.Node]
	case "blockdev-del":
		done = !now.nodes[s.Node]
	case "device_add":
		done = now.devices[s.Device]
	case "device_del":
		done = !now.devices[s.Device]
	case "add-fd":
		done = now.sets[s.Set]
	case "remove-fd":
		done = !now.sets[s.Set]
	case "blockdev-reopen", "block_resize", "set-action", "stop", "cont":
		// Repeating these commands has no further effect.
	default:
		return unknown
	}
	if done {
		return carriedOut
	}
	return notYet
}
