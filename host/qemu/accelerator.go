package qemu

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Accelerator names the means by which the guest's processors run.
type Accelerator struct {
	// Name is QEMU's name: kvm, or tcg for emulation.
	Name string
	// Reason says on one line why this accelerator was chosen.
	Reason string
}

// KVM reports whether the host's processor runs the guest. Without KVM, time limits should be
// longer.
func (a Accelerator) KVM() bool { return a.Name == "kvm" }

// Requests of <linux/kvm.h>, and the only version of the KVM interface that has ever existed.
const (
	kvmGetAPIVersion = 0xae00
	kvmCreateVM      = 0xae01
	kvmAPIVersion    = 12
)

// DetectAccelerator returns the accelerator that can run a guest on this host. If KVM exists but is
// unusable, that is not an error: it becomes the Reason for choosing TCG.
func DetectAccelerator() Accelerator { return detectAccelerator("/", createVM) }

// detectAccelerator looks for devices and modules below root. create tries to make a VM with the
// device at a path.
//
// A /dev/kvm that opens proves little: a kernel that offers KVM without the processor's help
// (kvm_pvm in nested virtualization) makes VMs in which no stock kernel boots. So detectAccelerator
// also requires one of the processor-specific modules to be loaded.
func detectAccelerator(root string, create func(device string) error) Accelerator {
	tcg := func(format string, args ...any) Accelerator {
		return Accelerator{"tcg", "KVM is not usable: " + fmt.Sprintf(format, args...)}
	}
	device := filepath.Join(root, "dev/kvm")
	if _, err := os.Stat(device); err != nil {
		return tcg("%v", err)
	}
	module := ""
	for _, name := range []string{"kvm_intel", "kvm_amd"} {
		if _, err := os.Stat(filepath.Join(root, "sys/module", name)); err == nil {
			module = name
		}
	}
	if module == "" {
		return tcg("%s exists, but neither kvm_intel nor kvm_amd is loaded", device)
	}
	if err := create(device); err != nil {
		return tcg("%v", err)
	}
	return Accelerator{"kvm", fmt.Sprintf("%s makes VMs, with %s", device, module)}
}

// createVM makes a VM with KVM and closes it again.
func createVM(device string) error {
	kvm, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer kvm.Close()
	version, err := unix.IoctlRetInt(int(kvm.Fd()), kvmGetAPIVersion)
	if err != nil {
		return fmt.Errorf("%s: KVM_GET_API_VERSION: %w", device, err)
	}
	if version != kvmAPIVersion {
		return fmt.Errorf("%s: API version %d, want %d", device, version, kvmAPIVersion)
	}
	vm, err := unix.IoctlRetInt(int(kvm.Fd()), kvmCreateVM)
	if err != nil {
		return fmt.Errorf("%s: KVM_CREATE_VM: %w", device, err)
	}
	return unix.Close(vm)
}
