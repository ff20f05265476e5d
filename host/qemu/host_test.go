package qemu

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestAcceleratorIsWhatTheHostReallyHas(t *testing.T) {
	dead := errors.New("KVM_CREATE_VM: inappropriate ioctl")
	for _, test := range []struct {
		name         string
		files        []string
		createErr    error
		want, reason string
	}{
		{"no device", nil, nil, "tcg", "no such file"},
		{"module without device", []string{"sys/module/kvm_intel/x"}, nil, "tcg", "no such file"},
		{"device without a processor's module", []string{"dev/kvm", "sys/module/kvm/x", "sys/module/kvm_pvm/x"}, nil, "tcg", "neither kvm_intel nor kvm_amd"},
		{"dead", []string{"dev/kvm", "sys/module/kvm_amd/x"}, dead, "tcg", "KVM_CREATE_VM"},
		{"intel", []string{"dev/kvm", "sys/module/kvm_intel/x"}, nil, "kvm", "kvm_intel"},
		{"amd", []string{"dev/kvm", "sys/module/kvm_amd/x"}, nil, "kvm", "kvm_amd"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := detectAccelerator(hostWith(t, test.files), func(string) error { return test.createErr })
			if got.Name != test.want || !strings.Contains(got.Reason, test.reason) || strings.Contains(got.Reason, "\n") {
				t.Errorf("want %s, with %q in a line\ngot  %+v", test.want, test.reason, got)
			}
			if got.KVM() != (test.want == "kvm") {
				t.Errorf("KVM() = %v for %s", got.KVM(), got.Name)
			}
		})
	}
}

// hostWith makes a root directory with the given files.
func hostWith(t *testing.T, files []string) string {
	t.Helper()
	root := t.TempDir()
	for _, name := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestUnusableKVMIsNotUsed(t *testing.T) {
	if err := createVM(image(t, 0)); err == nil || !strings.Contains(err.Error(), "KVM_GET_API_VERSION") {
		t.Errorf("a plain file made a VM: %v", err)
	}
}

func TestVsockByKernelOnlyWhereItsDeviceOpens(t *testing.T) {
	if got := detectVsock(hostWith(t, nil)); got.inKernel || got.reason == "" {
		t.Errorf("without a device: %+v", got)
	}
	if got := detectVsock(hostWith(t, []string{"dev/vhost-vsock"})); !got.inKernel {
		t.Errorf("with a device: %+v", got)
	}
}

func TestAgentAddressFollowsTransport(t *testing.T) {
	vm := &VM{cfg: Config{Dir: "/run/vm", GuestCID: 7}}
	if want, got := "hvsock:///run/vm/vsock.sock:1024", vm.AgentAddress(); got != want {
		t.Errorf("backend process:\nwant %s\ngot  %s", want, got)
	}
	vm.vsock.inKernel = true
	if want, got := "vsock://7:1024", vm.AgentAddress(); got != want {
		t.Errorf("kernel:\nwant %s\ngot  %s", want, got)
	}
}

func TestConfigIsCheckedBeforeAnythingRuns(t *testing.T) {
	good := Config{Dir: t.TempDir(), GuestCID: 3}
	if _, err := good.withDefaults(); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.Dir = "" }, "set Dir"},
		{func(c *Config) { c.GuestCID = 2 }, "3 or more"},
		{func(c *Config) { c.GuestCID = ^uint32(0) }, "3 or more"},
		{func(c *Config) { c.Bridges = 10 }, "1 to 9"},
		{func(c *Config) { c.MemoryMiB = -1 }, "positive"},
		{func(c *Config) { c.BootDisks = make([]Disk, maxBootDisks+1) }, "boot disks"},
		{func(c *Config) { c.Append = "quiet" }, "set Kernel"},
	} {
		cfg := good
		test.change(&cfg)
		if _, err := Start(limited(t), cfg); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("want %s\ngot  %v", test.want, err)
		}
	}
}

// Without the refusal, Start would wait for an agent that cannot start until the caller's deadline.
func TestMachineThatNothingBootsIsRefused(t *testing.T) {
	for name, cfg := range map[string]Config{
		"no kernel": {Dir: t.TempDir(), GuestCID: 3, Initrd: "guest.cpio"}, "no image": {Dir: t.TempDir(), GuestCID: 3, Kernel: "vmlinuz"},
	} {
		if _, err := StartMachine(limited(t), cfg); !errors.Is(err, errNothingBoots) {
			t.Errorf("%s\nwant %v\ngot  %v", name, errNothingBoots, err)
		}
	}
}

func TestMissingQEMUIsOneLineThatSaysWhatToInstall(t *testing.T) {
	_, err := Start(limited(t), Config{Dir: t.TempDir(), GuestCID: 3, Binary: "/nonexistent/qemu"})
	if err == nil || !strings.Contains(err.Error(), "install --no-install-recommends qemu-system-x86") || strings.Contains(err.Error(), "\n") {
		t.Errorf("want the package to install, in a line, got %v", err)
	}
}

func TestCommandLine(t *testing.T) {
	vm := &VM{
		cfg: Config{
			Dir: "/run/a,b", Binary: "/usr/bin/qemu-system-x86_64", Kernel: "vmlinuz", Append: "console=ttyS0 panic=-1",
			MemoryMiB: 512, CPUs: 2, Bridges: 1, GuestCID: 9,
		},
		accelerator: Accelerator{Name: "tcg"}, disks: newDiskTable(1, testStores(t), "the test"),
	}
	root := image(t, mib)
	if err := vm.disks.addBoot(limited(t), 0, Disk{ID: "root", Path: root, ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"/usr/bin/qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", "q35,memory-backend=memory,accel=tcg", "-cpu", "max", "-smp", "2", "-m", "512M",
		"-object", "memory-backend-memfd,id=memory,size=512M,share=on",
		"-chardev", "socket,id=monitor,server=on,wait=off,path=/run/a,,b/qmp.sock", "-mon", "chardev=monitor,mode=control",
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-device", "pci-bridge,id=b1,bus=pcie.0,addr=0x2,shpc=off,chassis_nr=1,mem-reserve=2M,pref64-reserve=2M,io-reserve=4K",
		"-chardev", "socket,id=vsock,path=/run/a,,b/vhost.sock", "-device", "vhost-user-vsock-pci,bus=pcie.0,addr=0x10,chardev=vsock",
		"-blockdev", `{"driver":"file","node-name":"file-root","filename":"` + root + `","read-only":true,"discard":"unmap"}`,
		"-blockdev", `{"driver":"raw","node-name":"drive-root","file":"file-root","read-only":true,"discard":"unmap"}`,
		"-device", `{"driver":"virtio-blk-pci","id":"disk-root-1","bus":"pcie.0","addr":"0x11","drive":"drive-root","vectors":0,"disable-legacy":"on","werror":"report","rerror":"report","cyls":16383,"heads":16,"secs":63}`,
		"-kernel", "vmlinuz", "-append", "console=ttyS0 panic=-1",
	}
	if got := vm.CommandLine(); !slices.Equal(got, want) {
		t.Errorf("command line:\nwant %q\ngot  %q", want, got)
	}
	if got := vm.Reproduce(); !strings.Contains(got, `-append 'console=ttyS0 panic=-1'`) || !strings.Contains(got, "vhost-vsock --socket /run/a,b/vhost.sock") {
		t.Errorf("Reproduce lacks the quoted kernel command line or the backend: %s", got)
	}
	vm.vsock.inKernel = true
	if got := vm.CommandLine(); !slices.Contains(got, "vhost-vsock-pci,bus=pcie.0,addr=0x10,guest-cid=9") {
		t.Errorf("no vhost-vsock-pci in %q", got)
	}
}

func TestQuoteIsForAShell(t *testing.T) {
	if want, got := `'it'\''s' plain`, shellLine([]string{"it's", "plain"}); got != want {
		t.Errorf("want %s\ngot  %s", want, got)
	}
}
