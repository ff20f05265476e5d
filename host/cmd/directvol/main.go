// Command directvol is the host side of direct-assigned volumes for containers that run in virtual
// machines. Its verbs are in package cli.
package main

import (
	"github.com/directvol/directvol/host/cli"
	"github.com/directvol/directvol/protocols/program"
)

func main() { program.Main(cli.New()) }
