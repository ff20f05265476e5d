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

// maxCuts is how often one command is taken up on a new connection before its outcome is left unknown.
const maxCuts = 10

// state is what QEMU has, as it says itself.
type state struct {
	run     string          // its run state, of RunState in qapi/run-state.json
	nodes   map[string]bool // block nodes, by their names
	devices map[string]bool // by their ids
	sets    map[int]bool    // of descriptors (add-fd)
}

// askState asks QEMU what it has.
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
	// No other query has the nodes without asking each store for its size, in QEMU's main loop: one that hangs stops the VM.
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
	// Where devices with an id are kept (qdev_set_id in softmmu/qdev-monitor.c).
	if err := ask(ctx, "qom-list", map[string]string{"path": "/machine/peripheral"}, &devices); err != nil {
		return state{}, err
	}
	for _, device := range devices {
		if strings.HasPrefix(device.Type, "child<") { // else it is a property of the container itself
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

// state asks QEMU what it has.
func (vm *VM) state(ctx context.Context) (state, error) {
	now, err := askState(ctx, vm.qmp.Execute)
	return now, vm.explained(ctx, err)
}

// settle asks what is true on a new QMP connection, and notes what was missed without one: the devices that have gone. Subscribers
// get an event for each, so far as they have room; the disks themselves need none.
func (vm *VM) settle(ctx context.Context, ask qmp.Ask) ([]qmp.Event, error) {
	now, missed, err := vm.whatHasLeft(ctx, ask)
	if err != nil {
		return nil, err
	}
	vm.log.Warnf("the QMP connection was lost, and is there again: QEMU is %s and has %d block nodes and %d devices; %d disks have left meanwhile",
		now.run, len(now.nodes), len(now.devices), len(missed))
	return missed, nil
}

// whatHasLeft asks what QEMU has, and notes the disks that have left and were not known to, with an event for each. Others may attach
// disks meanwhile: it is about those whose devices were there before.
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

// execute runs a QMP command. One that was cut off is decided by what QEMU has afterwards, and sent again where it was not
// carried out; where that does not decide it the error is qmp.ErrOutcomeUnknown. Where QEMU has ended, the error says so, and where it
// would stand still the command is not sent (ErrDiskHangs).
func (vm *VM) execute(ctx context.Context, command string, arguments, result any) error {
	if changesGraph[command] {
		if err := vm.awaitRequests(ctx); err != nil {
			return err
		}
	}
	return vm.explained(ctx, vm.decided(ctx, command, arguments, func() error { return vm.qmp.Execute(ctx, command, arguments, result) }))
}

// explained adds that QEMU has ended, where it has.
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

// decided sends a command until its outcome is known.
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

// subject is what a command is about: the names in its arguments.
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

// outcome of a command that was cut off.
type outcome int

const (
	unknown    outcome = iota
	carriedOut         // what it was to do is done
	notYet             // it was not carried out, and may be sent again
)

// outcome says by what QEMU has now whether a command was carried out.
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
		// Twice is as good as once.
	default:
		return unknown
	}
	if done {
		return carriedOut
	}
	return notYet
}
