package cli

import (
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/directvol/directvol/host/vhostvsock"
	"github.com/directvol/directvol/protocols/program"
)

func newVhostVsockCommand() *cobra.Command {
	var cfg vhostvsock.Config
	var debug bool
	cmd := &cobra.Command{
		Use:   "vhost-vsock --socket VHOST.sock --uds-path VM.sock --guest-cid N",
		Short: "Be the vsock device of one virtual machine",
		Long: `vhost-vsock is the vsock device of one QEMU virtual machine, for hosts without
/dev/vhost-vsock. It needs no privilege and runs until QEMU disconnects or a signal
ends it: exit 0 when QEMU stopped the device, at SIGTERM and after Ctrl-C, 1 when
QEMU vanished. It removes both sockets.

QEMU connects to --socket. Both sockets are there, and QEMU may be started, once
--socket exists; stale ones are replaced. QEMU's memory must be shared:

  qemu-system-x86_64 -m 1024 \
    -object memory-backend-memfd,id=m,size=1G,share=on -numa node,memdev=m \
    -chardev socket,id=vs,path=VHOST.sock -device vhost-user-vsock-pci,chardev=vs …

Programs on the host reach port P of the guest through --uds-path: connect, send
"CONNECT P\n", read "OK <number>\n" once the guest has accepted, and go on with
a byte stream. A connection that is closed without OK was refused: nobody
listens on that port. One that is made before the guest's driver is up waits.
One whose bytes the guest does not take for five minutes, or whose CONNECT does
not come or is not answered for as long, is closed. Whoever may connect to these
sockets may talk to the guest: they have mode 0600, and their folder should let
only its owner in. A file at their paths that is no socket is left alone.`,
		Example: `  directvol vhost-vsock --socket /run/vm1/vhost.sock --uds-path /run/vm1/vm.sock --guest-cid 3
  (echo CONNECT 1024; cat) | socat - UNIX-CONNECT:/run/vm1/vm.sock`,
		Args: program.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cfg.Check(); err != nil {
				return program.Usage(err)
			}
			log := logrus.New()
			log.SetOutput(cmd.ErrOrStderr())
			if debug {
				log.SetLevel(logrus.DebugLevel)
			}
			cfg.Log = log.WithField("guest-cid", cfg.GuestCID)
			b, err := vhostvsock.Listen(cfg)
			if err != nil {
				return err
			}
			return b.Serve(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Socket, "socket", "", "unix socket for QEMU, made by this command")
	f.StringVar(&cfg.UDSPath, "uds-path", "", "unix socket for programs on the host, made by this command")
	f.Uint64Var(&cfg.GuestCID, "guest-cid", 0, "the guest's vsock address, 3 or more")
	f.BoolVar(&debug, "debug", false, "log each connection that ends early, and why")
	for _, name := range []string{"socket", "uds-path", "guest-cid"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // the flag is defined above
		}
	}
	return cmd
}
