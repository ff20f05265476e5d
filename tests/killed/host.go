package killed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// hostSide is the process that runs a guest: it carries out the calls that it reads.
type hostSide struct {
	lines *remote.Lines
	send  sync.Mutex

	mu    sync.Mutex
	guest *vm.Guest // nil if none was started
}

// serveHost carries out the calls that it reads from rw, until rw ends. The guest ends with this
// process.
func serveHost(rw io.ReadWriter) error {
	h := &hostSide{lines: remote.NewLines(rw)}
	for {
		var r request
		if err := h.lines.Receive(&r); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		go h.serve(r)
	}
}

func (h *hostSide) serve(r request) {
	ctx, cancel := context.WithTimeout(context.Background(), r.Limit)
	defer cancel()
	a := answer{ID: r.ID}
	if err := h.carryOut(ctx, r, &a); err != nil {
		a.Error = err.Error()
	}
	h.send.Lock()
	defer h.send.Unlock()
	_ = h.lines.Send(a) // nobody receives it if the test has ended
}

var errNoGuest = errors.New("no guest was started")

func (h *hostSide) carryOut(ctx context.Context, r request, a *answer) (err error) {
	if r.Call == start {
		a.Text, err = h.start(ctx, r.Boot)
		return err
	}
	h.mu.Lock()
	g := h.guest
	h.mu.Unlock()
	if g == nil {
		return errNoGuest
	}
	switch r.Call {
	case check:
		return g.Agent().Check(ctx)
	case attach:
		return g.Attach(ctx, r.Volume)
	case mount:
		a.Text, err = g.Mount(ctx, r.Volume.ID)
	case stats:
		_, err = g.Sandbox.Stats(ctx, r.Volume.ID)
	case resize:
		return g.Resize(ctx, r.Volume.ID, r.Bytes)
	case unmount:
		return g.Unmount(ctx, r.Volume.ID)
	case detach:
		return g.Detach(ctx, r.Volume.ID)
	case stop:
		return g.Stop(ctx)
	case destroy:
		return g.Agent().DestroySandbox(ctx)
	case end:
		g.Kill()
	case look:
		a.Parts, err = parts(ctx, g)
	case explain:
		var said strings.Builder
		g.Explain(&said)
		a.Text = said.String()
	default:
		err = fmt.Errorf("no call %q", r.Call)
	}
	return err
}

func (h *hostSide) start(ctx context.Context, b boot) (string, error) {
	console, err := os.OpenFile(b.Console, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return "", err
	}
	o := vm.Options{Dir: b.Dir, Console: console, Log: os.Stderr}
	if b.Service {
		o.Append = remote.AsService + " agent.directvol.resize_wait=" + vm.Limit(callLimit).String()
	}
	g, err := vm.Boot(ctx, o)
	if err != nil {
		return "", errors.Join(err, console.Close())
	}
	h.mu.Lock()
	h.guest = g
	h.mu.Unlock()
	go func() {
		<-g.VM().Done()
		console.Close()
	}()
	return g.VM().GuestAddress(remote.Port), nil
}

// parts returns what the QEMU of a VM has for its disks: block nodes, and devices by their place on
// PCI.
func parts(ctx context.Context, g *vm.Guest) ([]string, error) {
	var nodes []struct {
		Name string `json:"node-name"`
	}
	if err := g.VM().QMP().Execute(ctx, "query-named-block-nodes", map[string]bool{"flat": true}, &nodes); err != nil {
		return nil, err
	}
	var buses []pciBus
	if err := g.VM().QMP().Execute(ctx, "query-pci", nil, &buses); err != nil {
		return nil, err
	}
	var names []string
	for _, node := range nodes {
		names = append(names, "block node "+node.Name)
	}
	for _, bus := range buses {
		names = append(names, bus.places()...)
	}
	slices.Sort(names)
	return names, nil
}

// pciBus is an element of query-pci's answer (qapi/pci.json).
type pciBus struct {
	Number  int `json:"bus"`
	Devices []struct {
		Slot   int             `json:"slot"`
		ID     string          `json:"qdev_id"`
		Bridge json.RawMessage `json:"pci_bridge"`
	} `json:"devices"`
}

func (b pciBus) places() (names []string) {
	for _, device := range b.Devices {
		names = append(names, fmt.Sprintf("PCI %02x:%02x %s", b.Number, device.Slot, device.ID))
		if device.Bridge == nil {
			continue
		}
		var behind struct {
			Bus struct {
				Number int `json:"number"`
			} `json:"bus"`
			pciBus
		}
		if json.Unmarshal(device.Bridge, &behind) != nil {
			names = append(names, fmt.Sprintf("PCI %02x:%02x leads to an unknown place", b.Number, device.Slot))
			continue
		}
		names = append(names, pciBus{Number: behind.Bus.Number, Devices: behind.Devices}.places()...)
	}
	return names
}

// vmDir returns the directory of the sockets of a guest's VM.
func vmDir(guestDir string) string { return filepath.Join(guestDir, "vm") }
