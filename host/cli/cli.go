// Package cli is the command line of the program directvol, with one file for each verb. A verb
// reads its flags, calls the package that does the work and prints the answer. Package program
// handles exit statuses, signals and --version; package output formats sizes, JSON and progress.
package cli

import "github.com/spf13/cobra"

// New returns the command directvol with all its verbs.
func New() *cobra.Command {
	root := &cobra.Command{
		Use:   "directvol",
		Short: "Block volumes for containers that run in virtual machines",
		Long: `directvol attaches block volumes to running virtual machines, where the agent in
the guest mounts, measures, grows and watches them.

Exit status: 0 success, 1 failure, 2 wrong command line, 130 interrupted.`,
		Example: `  directvol rescue /var/lib/volumes/data.img
  directvol vhost-vsock --socket /run/vm1/vhost.sock --uds-path /run/vm1/vm.sock --guest-cid 3`,
	}
	root.AddCommand(newRescueCommand(), newVhostVsockCommand())
	return root
}
