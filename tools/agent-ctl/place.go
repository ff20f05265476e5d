package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/program"
)

// hybridFlag is the name of a switch that may also be followed by true or false.
const hybridFlag = "hybrid-vsock"

// addresses is the part of a command's help that place.flags refers to.
const addresses = `The address is one of

  vsock://CID:PORT         the kernel's vsock; the agent's port is 1024
  hvsock:///path:PORT      a hybrid vsock socket: Firecracker, Cloud Hypervisor, directvol vhost-vsock
  unix:///path             a unix socket; with --hybrid-vsock a hybrid vsock socket
  unix://@/name            a unix socket in the abstract namespace
`

// place holds the flags that name an agent.
type place struct {
	server     string
	hybrid     bool
	hybridPort uint32
}

func (p *place) flags(flags *pflag.FlagSet) {
	flags.StringVar(&p.server, "server-address", "", "`URI` of the agent, see above")
	flags.BoolVar(&p.hybrid, hybridFlag, false, "treat the unix:// address as a hybrid vsock socket")
	flags.Uint32Var(&p.hybridPort, "hybrid-vsock-port", agentpb.Port, "`PORT` in the guest, with --hybrid-vsock")
}

// args accepts no arguments but the value of hybridFlag, as kata-agent-ctl does.
func (p *place) args(cmd *cobra.Command, args []string) error {
	if len(args) == 1 && cmd.Flags().Changed(hybridFlag) && (args[0] == "true" || args[0] == "false") {
		p.hybrid = args[0] == "true"
		return nil
	}
	return program.NoArgs(cmd, args)
}

// address returns the address to dial, with the hybrid flags taken into account.
func (p *place) address() (address.Address, error) {
	if p.server == "" {
		return address.Address{}, errors.New("--server-address is missing: name the agent's address, such as vsock://3:1024")
	}
	to, err := address.Parse(p.server)
	if err != nil || !p.hybrid {
		return to, err
	}
	if to.Scheme != address.Unix {
		return to, fmt.Errorf("--hybrid-vsock wants a unix:// address, not %s", p.server)
	}
	return address.Parse(address.Address{Scheme: address.HVSock, Path: to.Path, Port: p.hybridPort}.String())
}

// hint is printed if the connection to an address ends before the first answer.
func hint(to address.Address) string {
	if to.Scheme != address.Unix {
		return ""
	}
	return " before it answered: if " + to.Path + " is a hybrid vsock socket, which expects CONNECT first, add --hybrid-vsock"
}
