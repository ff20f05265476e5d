package experiments

import (
	"context"
	"slices"
	"strings"

	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/report"
)

// addGuest adds the facts that a guest and its QEMU report about themselves.
func addGuest(ctx context.Context, m *report.Machine, guest *vm.Guest) error {
	for path, to := range map[string]*string{report.CPUFile: &m.GuestCPU, report.ReleaseFile: &m.GuestKernel, "/proc/cmdline": &m.GuestCmdline, report.MeltdownFile: &m.GuestMeltdown} {
		text, err := guest.Remote.ReadFile(ctx, path)
		if err != nil {
			return err
		}
		*to = strings.TrimSpace(string(text))
	}
	m.GuestCPU = report.CPUModel(m.GuestCPU)
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

// optionOf returns the word that follows an option in a command line.
func optionOf(line []string, option string) string {
	if i := slices.Index(line, option); i >= 0 && i+1 < len(line) {
		return line[i+1]
	}
	return ""
}
