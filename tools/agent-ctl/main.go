// Command agent-ctl calls an agent in a guest by hand: directvol's own agent or Kata Containers'.
// Both speak the same ttrpc protocol (github.com/containerd/ttrpc, PROTOCOL.md; protocols/proto).
// The command line is like that of Kata's kata-agent-ctl.
package main

import (
	"github.com/spf13/cobra"

	"github.com/directvol/directvol/protocols/program"
)

func main() { program.Main(newRootCommand()) }

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "agent-ctl",
		Short: "Call the agent in a guest by hand",
		Long: `agent-ctl calls the agent in a guest by hand, directvol's or Kata Containers': every
method of grpc.AgentService, grpc.Health and directvol.v1.VolumeService, with a request
in JSON. Methods that directvol's agent does not have are marked; Kata's agent does not have
directvol.v1.VolumeService.

It is a tool for inspection and tests. The agent carries out every call: a DestroySandbox
ends all containers of the guest.`,
		Example: `  agent-ctl connect --server-address vsock://3:1024 -c Check -c Version
  agent-ctl watch --server-address vsock://3:1024
  agent-ctl list GetVolumeStats       # its fields and their types
  agent-ctl examples ResizeVolume     # a call to copy`,
	}
	root.AddCommand(newConnectCommand(), newWatchCommand(), newListCommand(), newExamplesCommand())
	return root
}
