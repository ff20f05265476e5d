package qemu

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

// Names of the sockets in the runtime directory.
const (
	monitorSocket = "qmp.sock"
	vhostSocket   = "vhost.sock"
	vsockSocket   = "vsock.sock"
)

// firstExtraFile is the descriptor that exec.Cmd gives its first extra file.
const firstExtraFile = 3

// findBinary returns the path of the QEMU program.
func findBinary(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("QEMU is missing (%w): install it with: apt-get install --no-install-recommends qemu-system-x86", err)
	}
	return path, nil
}

// confinement is the configuration of QEMU's seccomp filter (seccomp.h in QEMU's sources, option
// -sandbox). If a guest takes QEMU over, QEMU can start no program, change no user and no thread's
// priority.
const confinement = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"

// canConfine checks that a QEMU program was built with seccomp. A QEMU without seccomp does not
// know the option -sandbox and exits with status 1.
func canConfine(ctx context.Context, binary string) error {
	p, err := startProcess(ctx, "QEMU", exec.Command(binary, "-sandbox", confinement, "-version"))
	if err != nil {
		return err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		p.signalKill()
		return fmt.Errorf("%s -sandbox: it has not ended: %w", p.describe(), ctx.Err())
	}
	if p.err != nil {
		return fmt.Errorf("%s -sandbox: %s", binary, p.state())
	}
	return nil
}

// command returns the command that starts QEMU, with the files that QEMU inherits: the socket on
// which QEMU serves QMP, and the boot disks' stores.
func (vm *VM) command(monitor *os.File) *exec.Cmd {
	files := []*os.File{monitor}
	var args []string
	for _, d := range vm.disks.bootDisks() {
		args = append(args, "-add-fd", fmt.Sprintf("fd=%d,set=%d,opaque=%s", firstExtraFile+len(files), d.number, d.ID))
		files = append(files, d.store.File())
	}
	args = append(args, vm.arguments(fmt.Sprintf("fd=%d", firstExtraFile), (*disk).setName)...)
	cmd := exec.Command(vm.cfg.Binary, args...)
	cmd.ExtraFiles = files
	return cmd
}

// CommandLine returns a command line that starts the same VM by hand, with the console on the
// terminal. The VM has its boot disks, but not the disks that were attached later. Reproduce also
// prepares the directory and the vsock backend.
func (vm *VM) CommandLine() []string {
	args := vm.arguments("path="+escape(vm.path(monitorSocket)), func(d *disk) string { return d.store.Path() })
	return append([]string{vm.cfg.Binary}, args...)
}

// Reproduce returns shell lines that start the same VM by hand: they make its directory, start its
// vsock backend, and start QEMU.
func (vm *VM) Reproduce() string {
	lines := "mkdir -p -m 0700 " + quote(vm.cfg.Dir) + "\n"
	if !vm.vsock.inKernel {
		lines += shellLine(vm.backendCommand().Args) + " &\n"
	}
	return lines + shellLine(vm.CommandLine()) + "\n"
}

// arguments returns QEMU's arguments. monitor ends the options of the QMP socket's chardev; name
// returns the file name of a boot disk.
func (vm *VM) arguments(monitor string, name func(*disk) string) []string {
	cfg := &vm.cfg
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", "q35,memory-backend=memory,accel=" + vm.accelerator.Name,
		"-cpu", "max", "-smp", strconv.Itoa(cfg.CPUs), "-m", fmt.Sprintf("%dM", cfg.MemoryMiB),
		// The vsock backend reads and writes the guest's memory, so the memory must be shared.
		"-object", fmt.Sprintf("memory-backend-memfd,id=memory,size=%dM,share=on", cfg.MemoryMiB),
		"-chardev", "socket,id=monitor,server=on,wait=off," + monitor, "-mon", "chardev=monitor,mode=control",
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
	}
	if vm.confined {
		args = append(args, "-sandbox", confinement)
	}
	for bridge := 1; bridge <= cfg.Bridges; bridge++ {
		args = append(args, "-device", bridgeDevice(bridge))
	}
	args = append(args, vm.vsockArguments()...)
	for _, d := range vm.disks.bootDisks() {
		args = append(args, "-blockdev", toJSON(d.fileNode(name(d))), "-blockdev", toJSON(d.rawNode(FileNode(d.ID))), "-device", toJSON(d.deviceOptions()))
	}
	for _, option := range []struct{ name, value string }{{"-kernel", cfg.Kernel}, {"-initrd", cfg.Initrd}, {"-append", cfg.Append}} {
		if option.value != "" {
			args = append(args, option.name, option.value)
		}
	}
	return args
}

// bridgeDevice returns the options of a bridge for disks. Debian's cloud kernels support ACPI
// hotplug but not SHPC; and the firmware gives a bridge without SHPC no windows unless the bridge
// asks for them.
func bridgeDevice(bridge int) string {
	return fmt.Sprintf("pci-bridge,id=%s,bus=pcie.0,addr=%#x,shpc=off,chassis_nr=%d,mem-reserve=2M,pref64-reserve=2M,io-reserve=4K",
		slot{bridge: bridge}.bus(), bridgeSlot(bridge), bridge)
}

// escape quotes a value for an option list, in which a comma ends a value and two commas stand for
// one.
func escape(value string) string { return strings.ReplaceAll(value, ",", ",,") }

// toJSON encodes options as JSON, which QEMU's command line accepts too.
func toJSON(options any) string {
	text, err := json.Marshal(options)
	if err != nil {
		panic(err) // the options are structs of strings, numbers and booleans
	}
	return string(text)
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_./:=,@%+-]+$`)

// quote quotes a word for a POSIX shell.
func quote(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

func shellLine(words []string) string {
	quoted := make([]string, len(words))
	for i, word := range words {
		quoted[i] = quote(word)
	}
	return strings.Join(quoted, " ")
}
