package report

import (
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"
)

// Machine describes the machine of the measurements. A field is empty if its value could not be
// read or does not exist.
type Machine struct {
	Date         string `json:"date"`
	Commit       string `json:"commit"`
	Go           string `json:"go"`
	HostCPU      string `json:"host_cpu"`
	HostCPUs     int    `json:"host_cpus"`
	HostKernel   string `json:"host_kernel"`
	HostMeltdown string `json:"host_meltdown"`
	HostLoad     string `json:"host_load"` // the load averages at the start of the bench

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

// The kernel's files with these facts, on host and guest.
const (
	CPUFile      = "/proc/cpuinfo"
	ReleaseFile  = "/proc/sys/kernel/osrelease"
	MeltdownFile = "/sys/devices/system/cpu/vulnerabilities/meltdown"
	loadFile     = "/proc/loadavg"
)

// Host returns the facts about the host that this process runs on.
func Host() Machine {
	return Machine{
		Date: time.Now().UTC().Format(time.RFC3339), Commit: commit(), Go: runtime.Version(),
		HostCPU: CPUModel(hostFile(CPUFile)), HostCPUs: runtime.NumCPU(), HostKernel: hostFile(ReleaseFile),
		HostMeltdown: hostFile(MeltdownFile), HostLoad: hostFile(loadFile),
	}
}

func hostFile(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// commit returns the commit of the checkout, or "" without a checkout or without git, because
// nothing else needs them.
func commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

// CPUModel returns the CPU model in a /proc/cpuinfo, or "" if it names none.
func CPUModel(cpuinfo string) string {
	for text := range strings.Lines(cpuinfo) {
		if key, value, ok := strings.Cut(text, ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// facts returns the machine's facts for people, without the empty ones.
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
