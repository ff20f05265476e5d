package main

import (
	"context"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/directvol/directvol/tests/vm"
)

// Machine is where the figures come from. What could not be read, or was not there, is empty.
type Machine struct {
	Date         string `json:"date"`
	Commit       string `json:"commit"`
	Go           string `json:"go"`
	HostCPU      string `json:"host_cpu"`
	HostCPUs     int    `json:"host_cpus"`
	HostKernel   string `json:"host_kernel"`
	HostMeltdown string `json:"host_meltdown"`
	HostLoad     string `json:"host_load"` // the averages when the bench began

	QEMU          string `json:"qemu"`
	Accelerator   string `json:"accelerator"`
	CPUOption     string `json:"cpu_option"` // QEMU's -cpu
	GuestCPU      string `json:"guest_cpu"`
	GuestCPUs     string `json:"guest_cpus"` // QEMU's -smp
	GuestMemory   string `json:"guest_memory"`
	GuestKernel   string `json:"guest_kernel"`
	GuestCmdline  string `json:"guest_cmdline"`
	GuestMeltdown string `json:"guest_meltdown"`
	Agent         string `json:"agent"`
	KataAgent     string `json:"kata_agent"`
	Fio           string `json:"fio"`
}

// The kernel's files that tell them, on host and guest.
const (
	cpuFile       = "/proc/cpuinfo"
	releaseFile   = "/proc/sys/kernel/osrelease"
	meltdownFile  = "/sys/devices/system/cpu/vulnerabilities/meltdown"
	loadFile      = "/proc/loadavg"
	guestLineFile = "/proc/cmdline"
)

func hostFacts() Machine {
	return Machine{
		Date: time.Now().UTC().Format(time.RFC3339), Commit: commit(), Go: runtime.Version(),
		HostCPU: cpuModel(hostFile(cpuFile)), HostCPUs: runtime.NumCPU(), HostKernel: hostFile(releaseFile),
		HostMeltdown: hostFile(meltdownFile), HostLoad: hostFile(loadFile),
	}
}

func hostFile(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// commit is the checkout's, where there is one and git: nothing else needs either.
func commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

// cpuModel reads /proc/cpuinfo.
func cpuModel(cpuinfo string) string {
	for text := range strings.Lines(cpuinfo) {
		if key, value, ok := strings.Cut(text, ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// addGuest asks a guest and its QEMU.
func (m *Machine) addGuest(ctx context.Context, guest *vm.Guest) error {
	for path, to := range map[string]*string{cpuFile: &m.GuestCPU, releaseFile: &m.GuestKernel, guestLineFile: &m.GuestCmdline, meltdownFile: &m.GuestMeltdown} {
		text, err := guest.Act.ReadFile(ctx, path)
		if err != nil {
			return err
		}
		*to = strings.TrimSpace(string(text))
	}
	m.GuestCPU = cpuModel(m.GuestCPU)
	version, err := guest.Agent().Version(ctx)
	if err != nil {
		return err
	}
	m.Agent = version.AgentVersion
	accelerator := guest.VM().Accelerator()
	m.QEMU, m.Accelerator = guest.VM().Version(), accelerator.Name+" ("+accelerator.Reason+")"
	line := guest.VM().CommandLine()
	m.CPUOption, m.GuestCPUs, m.GuestMemory = optionOf(line, "-cpu"), optionOf(line, "-smp"), optionOf(line, "-m")
	return nil
}

// optionOf returns the value that follows an option.
func optionOf(line []string, option string) string {
	if i := slices.Index(line, option); i >= 0 && i+1 < len(line) {
		return line[i+1]
	}
	return ""
}

// facts are the machine's, for people: what is empty is left out.
func (m Machine) facts() [][2]string {
	all := [][2]string{
		{"date", m.Date}, {"commit", m.Commit}, {"Go", m.Go},
		{"host CPU", m.HostCPU}, {"host kernel", m.HostKernel}, {"host meltdown", m.HostMeltdown}, {"host load at the start", m.HostLoad},
		{"QEMU", m.QEMU}, {"accelerator", m.Accelerator}, {"-cpu", m.CPUOption}, {"-smp", m.GuestCPUs}, {"-m", m.GuestMemory},
		{"guest CPU", m.GuestCPU}, {"guest kernel", m.GuestKernel}, {"guest command line", m.GuestCmdline}, {"guest meltdown", m.GuestMeltdown},
		{"directvol-agent", m.Agent}, {"kata-agent", m.KataAgent}, {"fio", m.Fio},
	}
	return slices.DeleteFunc(all, func(fact [2]string) bool { return fact[1] == "" })
}
