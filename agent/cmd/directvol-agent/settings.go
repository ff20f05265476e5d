package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/version"
)

// settings come from the kernel's command line, with the names of Kata's agent (agent.*), and from
// flags, which take precedence.
type settings struct {
	level      logrus.Level
	listen     address.Address
	hotplug    time.Duration
	resizeWait time.Duration
	powerOff   bool
	state      string
	trim       time.Duration // 0 means never
	low        health.Thresholds

	// Ports of vsock; 0 means none, as in Kata.
	logPort     uint32
	consolePort uint32
	console     bool // a shell on consolePort, or on the console if that is 0
}

func defaults() settings {
	return settings{
		level:      logrus.InfoLevel,
		listen:     address.Address{Scheme: address.VSock, Port: agentpb.Port},
		hotplug:    3 * time.Second,
		resizeWait: 1500 * time.Millisecond, // Kata's clients give up after 2 s or 3 s
		state:      "/run/directvol/agent.json",
		trim:       7 * 24 * time.Hour, // as fstrim.timer of util-linux
	}
}

// options lists the settings with their flags and their names on the kernel's command line, without
// "agent.".
func (s *settings) options() []option {
	return []option{
		{"log", "log", "how much to log: critical, error, warn, info, debug or trace", func(v string) error { return parseLevel(v, &s.level) }},
		{"log-vport", "log_vport", "the vsock port where the host reads the log, instead of the console", func(v string) error { return parsePort(v, &s.logPort) }},
		{"debug-console", debugConsole, "open a shell: on the console if the agent is PID 1, and again whenever it exits; with -debug-console-vport one for each connection", func(v string) error { return parseSwitch(v, &s.console) }},
		{"debug-console-vport", "debug_console_vport", "with -debug-console: the vsock port where each connection of the host gets a shell, instead of the console", func(v string) error { return parsePort(v, &s.consolePort) }},
		{"server-addr", "server_addr", "where to listen: vsock://-1:1024 for the host, or unix:///path for root in the guest", func(v string) error { return parseListen(v, &s.listen) }},
		{"hotplug-timeout", "hotplug_timeout", "how long to wait for a disk that is being plugged in, such as 3 or 3s", func(v string) error { return parseDuration(v, &s.hotplug) }},
		{"resize-wait", "directvol.resize_wait", "how long ResizeVolume waits for the disk's new size, such as 1.5s", func(v string) error { return parseDuration(v, &s.resizeWait) }},
		{"state", "directvol.state", "file on a tmpfs where a service saves its storages and their holders, so that a restart keeps them", func(v string) error { return parsePath(v, &s.state) }},
		{"trim", "directvol.trim", "how often to give the free blocks of each mounted volume back to its storage, such as 168h; 0 means never", func(v string) error { return parseInterval(v, &s.trim) }},
		{"low-space", "directvol.low_space", "the percentage of available space below which a volume has the condition LowSpace, up to 50; 0 means never", func(v string) error { return parsePercent(v, &s.low.Space) }},
		{"low-inodes", "directvol.low_inodes", "the percentage of available inodes below which a volume has the condition LowInodes, up to 50; 0 means never", func(v string) error { return parsePercent(v, &s.low.Inodes) }},
		{"poweroff", "directvol.poweroff", "on: power the VM off after DestroySandbox; as PID 1 only", func(v string) error { return parseSwitch(v, &s.powerOff) }},
	}
}

type option struct {
	flag, kernel, usage string
	set                 func(string) error
}

// debugConsole is an option that needs no value.
const debugConsole = "debug_console"

// bare reports whether the option may have no value.
func (o option) bare() bool { return o.kernel == debugConsole }

// katas are the options of Kata's agent (src/agent/src/config.rs) that this agent ignores, without
// "agent.". A name that ends with "_" is a prefix.
var katas = []string{
	"devmode", "trace", "config_file", "passfd_listener_port", "container_pipe_size", "unified_cgroup_hierarchy", "launch_process_timeout",
	"cdh_api_timeout", "image_pull_timeout", "cdi_timeout", "visible_cdi_devices", "guest_components_", "secure_storage_integrity",
	"image_registry_auth", "enable_signature_verification", "image_policy_file", "aa_kbc_params", "https_proxy", "no_proxy", "mem_agent_",
}

func isKatas(name string) bool {
	return slices.ContainsFunc(katas, func(known string) bool {
		return name == known || strings.HasSuffix(known, "_") && strings.HasPrefix(name, known)
	})
}

// fromKernel reads a kernel command line. It skips the options of Kata's agent that this agent does
// not use. The error names all options that are wrong or unknown.
func (s *settings) fromKernel(line string) error {
	var errs []error
	for word := range strings.FieldsSeq(line) {
		key, value, valued := strings.Cut(word, "=")
		name, ours := strings.CutPrefix(key, "agent.")
		if !ours || isKatas(name) {
			continue
		}
		if err := s.setFromKernel(name, value, valued); err != nil {
			errs = append(errs, fmt.Errorf("kernel command line: %s: %w", word, err))
		}
	}
	return errors.Join(errs...)
}

func (s *settings) setFromKernel(name, value string, valued bool) error {
	for _, o := range s.options() {
		if name != o.kernel {
			continue
		}
		if o.bare() && !valued {
			value = "on"
		}
		return o.set(value)
	}
	return errors.New("unknown option, here and in Kata's agent: directvol-agent -help lists the options")
}

// fromFlags reads a command line's arguments. If told is not empty, the caller prints it and exits.
func (s *settings) fromFlags(args []string) (told string, err error) {
	flags := flag.NewFlagSet("directvol-agent", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	s.define(flags)
	showVersion := flags.Bool("version", false, "print the version and exit")
	err = flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return usage(flags), nil
	case err != nil:
		return "", err
	case flags.NArg() > 0:
		return "", fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case *showVersion:
		return "directvol-agent " + version.String() + "\n", nil
	}
	return "", nil
}

// define adds a flag for each option.
func (s *settings) define(flags *flag.FlagSet) {
	for _, o := range s.options() {
		if o.bare() {
			flags.BoolFunc(o.flag, o.usage+" (kernel command line: agent."+o.kernel+")", o.set)
			continue
		}
		flags.Func(o.flag, o.usage+" (kernel command line: agent."+o.kernel+"=)", o.set)
	}
}

func usage(flags *flag.FlagSet) string {
	var text strings.Builder
	text.WriteString("directvol-agent mounts, measures, grows and watches the volumes of this guest.\nIt answers the host (CID 2) over vsock, and is the guest's init or a service.\n\nFlags:\n")
	flags.SetOutput(&text)
	flags.PrintDefaults()
	return text.String()
}

// parseDuration parses "1.5s", or "3" as seconds, as Kata writes it.
func parseDuration(v string, to *time.Duration) error {
	if _, err := strconv.ParseFloat(v, 64); err == nil {
		v += "s"
	}
	d, err := time.ParseDuration(v)
	if err != nil || d <= 0 {
		return fmt.Errorf("%.40q is not a positive duration, such as 1.5s", v)
	}
	*to = d
	return nil
}

// parseInterval parses a duration as parseDuration does, or 0.
func parseInterval(v string, to *time.Duration) error {
	if v == "0" {
		*to = 0
		return nil
	}
	return parseDuration(v, to)
}

// parsePercent parses "5" or "5%".
func parsePercent(v string, to *int) error {
	percent, err := strconv.ParseUint(strings.TrimSuffix(v, "%"), 10, 8)
	if err != nil || percent > health.MaxThreshold {
		return fmt.Errorf("%.40q is not a percentage from 0 to %d", v, health.MaxThreshold)
	}
	*to = int(percent)
	return nil
}

// parseLevel parses a level of Kata's agent or of logrus.
func parseLevel(v string, to *logrus.Level) error {
	if v == "critical" {
		v = "fatal"
	}
	level, err := logrus.ParseLevel(v)
	if err != nil {
		return fmt.Errorf("%.40q is not a log level, such as info or debug", v)
	}
	*to = level
	return nil
}

func parsePort(v string, to *uint32) error {
	port, err := strconv.ParseUint(v, 10, 32)
	if err != nil || port == math.MaxUint32 { // the kernel's value for any port
		return fmt.Errorf("%.40q is not a vsock port: want a number from 1 to %d", v, uint32(math.MaxUint32-1))
	}
	*to = uint32(port)
	return nil
}

// parseListen parses an address. The CID of a vsock address is ignored; Kata writes it as -1.
func parseListen(v string, to *address.Address) error {
	listen, err := address.Parse(strings.Replace(v, "vsock://-1:", "vsock://0:", 1))
	if err != nil {
		return err
	}
	if listen.Scheme == address.HVSock {
		return fmt.Errorf("%s is an address for the host: an agent listens on vsock:// or unix://", v)
	}
	*to = listen
	return nil
}

func parsePath(v string, to *string) error {
	if !filepath.IsAbs(v) {
		return fmt.Errorf("%.80q is not an absolute path", v)
	}
	*to = v
	return nil
}

func parseSwitch(v string, to *bool) error {
	switch v {
	case "on", "true", "1":
		*to = true
	case "off", "false", "0":
		*to = false
	default:
		return fmt.Errorf("%.40q is neither on nor off", v)
	}
	return nil
}
