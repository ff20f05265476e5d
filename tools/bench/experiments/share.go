package experiments

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/guest/act"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

// virtiofsds are where Debian has the host's side of virtio-fs: QEMU's own, which comes with QEMU in Debian 12 (docs/tools/virtiofsd in QEMU's
// sources), or its successor. They take the same options.
var virtiofsds = []string{"/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd"}

// shareName is the tag, the device and the chardev of the shared folder.
const shareName = "shared"

// share mounts a folder of the host in the guest, by virtio-fs, at sharedPath. end takes it away.
func (l *Lab) share(ctx context.Context, guest *vm.Guest) (end func(context.Context) error, err error) {
	i := slices.IndexFunc(virtiofsds, func(path string) bool { _, err := os.Stat(path); return err == nil })
	if i < 0 {
		return nil, measure.Unavailable("there is none of %v: install package virtiofsd", virtiofsds)
	}
	if os.Geteuid() != 0 {
		return nil, measure.Unavailable("virtiofsd shares a folder for root alone: run the bench as root for this row")
	}
	folder, err := os.MkdirTemp(guest.Dir, "shared-") // on the filesystem that the volume's image is on
	if err != nil {
		return nil, err
	}
	daemon, err := l.startVirtiofsd(virtiofsds[i], folder)
	if err != nil {
		return nil, err
	}
	if err := plugShare(ctx, guest, daemon.socket); err != nil {
		daemon.stop()
		return nil, fmt.Errorf("%w\n%s", err, daemon.said.String())
	}
	return func(ctx context.Context) error {
		defer daemon.stop() // QEMU has let go of it then, or is to be ended
		defer os.RemoveAll(folder)
		return unplugShare(ctx, guest)
	}, nil
}

// daemon is a virtiofsd.
type daemon struct {
	*exec.Cmd
	socket string
	said   bytes.Buffer // whole once it has ended
	stop   func()       // ends it with the children that it makes for its sandbox
}

// startVirtiofsd starts one that listens already.
func (l *Lab) startVirtiofsd(program, folder string) (*daemon, error) {
	d := &daemon{socket: filepath.Join(l.dir, "virtiofsd.sock")}
	os.Remove(d.socket)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: d.socket, Net: "unix"})
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
	d.Cmd = exec.Command(program, fmt.Sprintf("--fd=%d", firstExtra), "-f", "-o", "source="+folder, "-o", "sandbox=chroot", "-o", "cache=auto", "-o", "log_level=err")
	d.ExtraFiles = []*os.File{inherited}
	d.Stdout, d.Stderr = &d.said, &d.said
	d.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := d.Start(); err != nil {
		return nil, err
	}
	d.stop = sync.OnceFunc(func() {
		_ = unix.Kill(-d.Process.Pid, unix.SIGKILL) // fails only where all have ended
		_ = d.Wait()                                // killed, as it was to be
	})
	l.atEnd = append(l.atEnd, d.stop)
	return d, nil
}

// The device's place: the last slot of the last bridge, which no disk gets while another is free.
const shareBus, shareSlot = "b2", "0x1e"

// plugShare gives the guest the device, with a line interrupt as its disks have, and mounts it.
func plugShare(ctx context.Context, guest *vm.Guest, socket string) error {
	for _, command := range []struct {
		name      string
		arguments any
	}{
		{"chardev-add", map[string]any{"id": shareName, "backend": map[string]any{"type": "socket", "data": map[string]any{
			"server": false, "addr": map[string]any{"type": "unix", "data": map[string]any{"path": socket}},
		}}}},
		{"device_add", map[string]any{"driver": "vhost-user-fs-pci", "id": shareName, "chardev": shareName, "tag": shareName, "bus": shareBus, "addr": shareSlot, "vectors": 0}},
	} {
		if err := guest.VM().QMP().Execute(ctx, command.name, command.arguments, nil); err != nil {
			return err
		}
	}
	if err := guest.Act.Mkdir(ctx, sharedPath, 0o755); err != nil {
		return err
	}
	return mountSoon(ctx, guest, act.Mount{Source: shareName, Target: sharedPath, FSType: "virtiofs"})
}

// mountSoon mounts what the guest does not know yet, at the moment.
func mountSoon(ctx context.Context, guest *vm.Guest, m act.Mount) error {
	for {
		err := guest.Act.Mount(ctx, m)
		if !errors.Is(err, syscall.EINVAL) { // how virtio-fs says that there is no such tag
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%w (%w)", ctx.Err(), err)
		}
	}
}

// unplugShare unmounts and takes the device away.
func unplugShare(ctx context.Context, guest *vm.Guest) error {
	if err := guest.Act.Unmount(ctx, sharedPath, 0); err != nil {
		return err
	}
	qmp := guest.VM().QMP()
	deleted := qmp.Subscribe("DEVICE_DELETED")
	defer deleted.Close()
	if err := qmp.Execute(ctx, "device_del", map[string]any{"id": shareName}, nil); err != nil {
		return err
	}
	for {
		select {
		case event, ok := <-deleted.Events():
			if !ok || bytes.Contains(event.Data, []byte(`"`+shareName+`"`)) {
				return qmp.Execute(ctx, "chardev-remove", map[string]any{"id": shareName}, nil)
			}
		case <-ctx.Done():
			return fmt.Errorf("the guest does not let go of virtio-fs: %w", ctx.Err())
		}
	}
}
