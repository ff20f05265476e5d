package vm

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// virtiofsds are where Debian has the host's side of virtio-fs: QEMU's own, which comes with QEMU in Debian 12
// (docs/tools/virtiofsd in QEMU's sources), or its successor. They take the same options.
var virtiofsds = []string{"/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd"}

// FindVirtiofsd returns the program that is installed, which root alone can run.
func FindVirtiofsd() (string, error) {
	i := slices.IndexFunc(virtiofsds, exists)
	if i < 0 {
		return "", fmt.Errorf("none of %v is installed: install package virtiofsd, or QEMU of Debian 12", virtiofsds)
	}
	if os.Geteuid() != 0 {
		return "", fmt.Errorf("%s shares a folder for root alone: run this as root", virtiofsds[i])
	}
	return virtiofsds[i], nil
}

// Virtiofsd is a process that shares a folder of the host.
type Virtiofsd struct {
	process *exec.Cmd
	said    console
	stop    func()
}

// StartVirtiofsd shares a folder on a socket, on which it listens already. The caller stops it.
func StartVirtiofsd(program, folder, socket string) (*Virtiofsd, error) {
	os.Remove(socket)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	listener.SetUnlinkOnClose(false)
	inherited, err := listener.File()
	if err != nil {
		return nil, err
	}
	defer inherited.Close()
	const firstExtra = 3 // the descriptor of the first of exec.Cmd's ExtraFiles
	// Its other sandbox wants a root that is a mount point.
	d := &Virtiofsd{process: exec.Command(program, fmt.Sprintf("--fd=%d", firstExtra), "-f", "-o", "source="+folder, "-o", "sandbox=chroot", "-o", "cache=auto", "-o", "log_level=err")}
	d.process.ExtraFiles = []*os.File{inherited}
	d.process.Stdout, d.process.Stderr = &d.said, &d.said
	d.process.SysProcAttr = &unix.SysProcAttr{Setpgid: true} // for its sandbox it makes children
	if err := d.process.Start(); err != nil {
		return nil, err
	}
	d.stop = sync.OnceFunc(func() {
		_ = unix.Kill(-d.process.Process.Pid, unix.SIGKILL) // fails only where all have ended
		_ = d.process.Wait()                                // killed, as it was to be
	})
	return d, nil
}

// Stop ends it with its children, once.
func (d *Virtiofsd) Stop() { d.stop() }

// Said returns the last lines that it printed.
func (d *Virtiofsd) Said() string { return d.said.tail(consoleLines) }
