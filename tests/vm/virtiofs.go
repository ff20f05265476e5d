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

// virtiofsds are the paths of the host's side of virtio-fs in Debian: QEMU's own, which is part of
// QEMU in Debian 12 (docs/tools/virtiofsd in QEMU's sources), or its successor. Both accept the
// same options.
var virtiofsds = []string{"/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd"}

// FindVirtiofsd returns the installed program, which only root can run.
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

// StartVirtiofsd shares a folder on a socket. When it returns, the socket listens. The caller stops
// the process.
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
	// The other kind of sandbox requires a root that is a mount point.
	d := &Virtiofsd{process: exec.Command(program, fmt.Sprintf("--fd=%d", firstExtra), "-f", "-o", "source="+folder, "-o", "sandbox=chroot", "-o", "cache=auto", "-o", "log_level=err")}
	d.process.ExtraFiles = []*os.File{inherited}
	d.process.Stdout, d.process.Stderr = &d.said, &d.said
	d.process.SysProcAttr = &unix.SysProcAttr{Setpgid: true} // because its sandbox makes children
	if err := d.process.Start(); err != nil {
		return nil, err
	}
	d.stop = sync.OnceFunc(func() {
		_ = unix.Kill(-d.process.Process.Pid, unix.SIGKILL) // fails only if all have ended
		_ = d.process.Wait()                                // it was killed on purpose
	})
	return d, nil
}

// Stop ends the process and its children. It may be called several times.
func (d *Virtiofsd) Stop() { d.stop() }

// Said returns the last lines that it printed.
func (d *Virtiofsd) Said() string { return d.said.tail(consoleLines) }
