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
		Short: "Serve the vsock device of one virtual machine",
		Long: `vhost-vsock serves the vsock device of one QEMU virtual machine, for hosts without
/dev/vhost-vsock. It needs no privilege and runs until QEMU disconnects or a signal
ends it: exit 0 when QEMU stopped the device, at SIGTERM and after Ctrl-C, 1 when
QEMU vanished. It removes both sockets.

QEMU connects to --socket. Both sockets exist as soon as --socket does, and QEMU
may be started then. Stale sockets are replaced. QEMU's memory must be shared:

  qemu-system-x86_64 -m 1024 \
    -object memory-backend-memfd,id=m,size=1G,share=on -numa node,memdev=m \
    -chardev socket,id=vs,path=VHOST.sock -device vhost-user-vsock-pci,chardev=vs …

Programs on the host reach port P of the guest through --uds-path: connect, send
"CONNECT P\n", read "OK <number>\n" once the guest has accepted, then exchange
bytes. A connection that is closed without OK was refused: nothing listens on that
port. A connection that is made before the guest's driver is up waits. A connection
is closed if for five minutes the guest takes none of its bytes, its CONNECT does
not arrive, or the guest does not answer the CONNECT. Every user who may connect to
these sockets may talk to the guest: the sockets have mode 0600, and only their
owner should have access to their folder. A file at their paths that is not a socket
is left alone.`,
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
	f.StringVar(&cfg.Socket, "socket", "", "unix socket for QEMU, created by this command")
	f.StringVar(&cfg.UDSPath, "uds-path", "", "unix socket for programs on the host, created by this command")
	f.Uint64Var(&cfg.GuestCID, "guest-cid", 0, "the guest's vsock address, 3 or more")
	f.BoolVar(&debug, "debug", false, "log each connection that ends early, with the reason")
	for _, name := range []string{"socket", "uds-path", "guest-cid"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // the flag is defined above
		}
	}
	return cmd
}
