package main

import (
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/protocols/address"
)

func TestKernelCommandLineIsReadAsKataWritesIt(t *testing.T) {
	set := defaults()
	line := "console=ttyS0 agent.log=debug agent.log_vport=1025 agent.debug_console agent.debug_console_vport=1026 agent.hotplug_timeout=7 agent.directvol.resize_wait=250ms agent.directvol.poweroff=on agent.directvol.state=/run/x agent.directvol.trim=12h agent.directvol.low_space=5 agent.directvol.low_inodes=3% agent.unified_cgroup_hierarchy=1 quiet\n"
	if err := set.fromKernel(line); err != nil {
		t.Fatal(err)
	}
	want := settings{level: logrus.DebugLevel, listen: defaults().listen, hotplug: 7 * time.Second, resizeWait: 250 * time.Millisecond, powerOff: true, state: "/run/x", trim: 12 * time.Hour, low: health.Thresholds{Space: 5, Inodes: 3}, logPort: 1025, consolePort: 1026, console: true}
	if set != want {
		t.Errorf("\nwant %+v\ngot  %+v", want, set)
	}
}

func TestDebugConsoleIsOffUnlessAskedFor(t *testing.T) {
	for line, want := range map[string]bool{"agent.debug_console": true, "agent.debug_console=off": false, "agent.debug_console=on": true, "agent.debug_consoles": false, "agent.debug_console_vport=0": false} {
		set := defaults()
		if err := set.fromKernel(line); err != nil && want || set.console != want || set.consolePort != 0 {
			t.Errorf("%s\nwant %v\ngot  %+v, error %v", line, want, set, err)
		}
	}
}

func TestLevelsAreThoseOfKatasAgent(t *testing.T) {
	for text, want := range map[string]logrus.Level{
		"critical": logrus.FatalLevel, "error": logrus.ErrorLevel, "warn": logrus.WarnLevel, "info": logrus.InfoLevel, "debug": logrus.DebugLevel, "trace": logrus.TraceLevel,
	} {
		set := defaults()
		if err := set.fromKernel("agent.log=" + text); err != nil || set.level != want {
			t.Errorf("%s\nwant %v\ngot  %v, error %v", text, want, set.level, err)
		}
	}
}

func TestServerAddressHasKatasForm(t *testing.T) {
	for text, want := range map[string]address.Address{
		"vsock://-1:1025":     {Scheme: address.VSock, Port: 1025},
		"unix:///run/dv.sock": {Scheme: address.Unix, Path: "/run/dv.sock"},
	} {
		set := defaults()
		if err := set.fromKernel("agent.server_addr=" + text); err != nil || set.listen != want {
			t.Errorf("%s\nwant %+v\ngot  %+v, %v", text, want, set.listen, err)
		}
	}
}

func TestWrongSettingIsNamedAndChangesNothing(t *testing.T) {
	for _, word := range []string{"agent.hotplug_timeout=-1", "agent.hotplug_timeout=soon", "agent.directvol.poweroff=maybe", "agent.log=loud", "agent.server_addr=hvsock:///x:1", "agent.server_addr=tcp://1:2", "agent.directvol.resize_wait=", "agent.directvol.state=run", "agent.directvol.trim=-1", "agent.directvol.trim=", "agent.directvol.low_space=51", "agent.directvol.low_space=-1", "agent.directvol.low_inodes=few", "agent.directvol.low_inodes=5%%",
		"agent.log_vport=-1", "agent.log_vport=", "agent.log_vport", "agent.log_vport=4294967295", "agent.debug_console_vport=0x1p4", "agent.debug_console=maybe", "agent.debug_console="} {
		set := defaults()
		err := set.fromKernel("quiet " + word)
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: got error %v", word, err)
		}
		if set != defaults() {
			t.Errorf("%s left %+v", word, set)
		}
	}
}

func TestMisspeltOptionIsNamedAndKatasOptionsAreIgnored(t *testing.T) {
	for word, known := range map[string]bool{
		"agent.hotplug_timeot=7": false, "agent.directvol.powerof=on": false, "agent.": false, "agent.debug_consoles": false,
		"agent.devmode": true, "agent.mem_agent_memcg_swap=1": true, "agent.guest_components_procs=none": true, "agent.trace": true,
		"agents.x=1": true, "xagent.log=loud": true,
	} {
		set := defaults()
		err := set.fromKernel("quiet " + word + " agent.log=error")
		if (err == nil) != known || err != nil && !strings.Contains(err.Error(), word) || set.level != logrus.ErrorLevel {
			t.Errorf("%s\nwant it known: %v, and the next option read\ngot  error %v, %+v", word, known, err, set)
		}
	}
}

func TestFlagsWinOverTheKernelCommandLine(t *testing.T) {
	set := defaults()
	if err := set.fromKernel("agent.log=error"); err != nil {
		t.Fatal(err)
	}
	told, err := set.fromFlags([]string{"-log", "debug", "-debug-console", "-log-vport=1025"})
	if err != nil || told != "" || set.level != logrus.DebugLevel || !set.console || set.logPort != 1025 {
		t.Errorf("%+v, told %q, error %v", set, told, err)
	}
}

func TestWrongFlagIsNamedWithoutTheWholeHelp(t *testing.T) {
	for _, args := range [][]string{{"-log", "loud"}, {"-log-vport=x"}, {"-bogus"}, {"-state"}, {"bogus"}} {
		set := defaults()
		told, err := set.fromFlags(args)
		name := strings.TrimPrefix(strings.Split(args[0], "=")[0], "-")
		if err == nil || told != "" || !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q\nwant one line that names %s\ngot  %q, error %v", args, name, told, err)
		}
	}
}

func TestHelpNamesEveryOptionInBothItsForms(t *testing.T) {
	set := defaults()
	told, err := set.fromFlags([]string{"-help"})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range set.options() {
		if !strings.Contains(told, "  -"+o.flag) || !strings.Contains(told, "agent."+o.kernel) {
			t.Errorf("want -%s and agent.%s\ngot\n%s", o.flag, o.kernel, told)
		}
	}
}

func TestVolumesAreTrimmedWeeklyUnlessASettingSaysNever(t *testing.T) {
	for line, want := range map[string]time.Duration{"quiet": 168 * time.Hour, "agent.directvol.trim=0": 0, "agent.directvol.trim=3600": time.Hour} {
		set := defaults()
		if err := set.fromKernel(line); err != nil || set.trim != want || set.low != (health.Thresholds{}) {
			t.Errorf("%s\nwant %v, and no thresholds\ngot  %v, %+v, error %v", line, want, set.trim, set.low, err)
		}
	}
}
