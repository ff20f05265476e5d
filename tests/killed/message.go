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

	Volume sandbox.Volume `json:"volume"`          // of attach; of others the ID alone
	Bytes  uint64         `json:"bytes,omitempty"` // of resize
	Boot   boot           `json:"boot"`            // of start
}

// call is one that the host's side can carry out.
type call string

// The calls that are made of a sandbox.
const (
	start   call = "start"
	check   call = "check" // that the agent answers
	attach  call = "attach"
	mount   call = "mount"
	stats   call = "stats"
	resize  call = "resize"
	unmount call = "unmount"
	detach  call = "detach"
	stop    call = "stop"
	destroy call = "destroy" // the sandbox, whose VM goes on
	end     call = "kill"
	look    call = "look"    // at what QEMU has
	explain call = "explain" // what the guest has said
)

// boot is how a guest is started.
type boot struct {
	Dir     string `json:"dir"`     // for its VM
	Console string `json:"console"` // a file, which gets what the guest says
	Service bool   `json:"service"` // the agent is a service
}

// answer is the end of a call.
type answer struct {
	ID    uint64 `json:"id"`
	Error string `json:"error,omitempty"`

	Text  string   `json:"text,omitempty"`  // of start: where a port of the guest is reached; of mount: where in the guest it is; of explain
	Parts []string `json:"parts,omitempty"` // of look
}
