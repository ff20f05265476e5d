package killed

import (
	"time"

	"github.com/directvol/directvol/host/sandbox"
)

// request is a call for the host's side.
type request struct {
	ID    uint64        `json:"id"`
	Call  call          `json:"call"`
	Limit time.Duration `json:"limit"`

	Volume sandbox.Volume `json:"volume"`          // of attach; other calls use only the ID
	Bytes  uint64         `json:"bytes,omitempty"` // of resize
	Boot   boot           `json:"boot"`            // of start
}

// call is a call that the host's side can carry out.
type call string

// The calls of a sandbox.
const (
	start   call = "start"
	check   call = "check" // check that the agent answers
	attach  call = "attach"
	mount   call = "mount"
	stats   call = "stats"
	resize  call = "resize"
	unmount call = "unmount"
	detach  call = "detach"
	stop    call = "stop"
	destroy call = "destroy" // destroy the sandbox; the VM continues
	end     call = "kill"
	look    call = "look"    // look at QEMU's parts
	explain call = "explain" // return the guest's console
)

// boot says how to start a guest.
type boot struct {
	Dir     string `json:"dir"`     // directory of its VM
	Console string `json:"console"` // file for the guest's console output
	Service bool   `json:"service"` // the agent runs as a service
}

// answer is the result of a call.
type answer struct {
	ID    uint64 `json:"id"`
	Error string `json:"error,omitempty"`

	Text  string   `json:"text,omitempty"`  // of start: the address of a port of the guest; of mount: the mount point in the guest; of explain
	Parts []string `json:"parts,omitempty"` // of look
}
