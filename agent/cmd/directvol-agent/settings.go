package main

import (
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
)

// settings come from the kernel's command line, as Kata's agent has them
// (agent.*), and from flags, which win.
type settings struct {
	level      logrus.Level
	listen     address.Address
	hotplug    time.Duration
	resizeWait time.Duration
	powerOff   bool
	state      string
}

func defaults() settings {
	return settings{
		level:      logrus.InfoLevel,
		listen:     address.Address{Scheme: address.VSock, Port: agentpb.Port},
		hotplug:    3 * time.Second,
		resizeWait: 1500 * time.Millisecond, // Kata's clients give up after 2 s or 3 s
		state:      "/run/directvol/agent.json",
	}
}

// options are the settings by the name that they have on the kernel's command
// line, less "agent.", and as flags.
func (s *settings) options() []option {
	return []option{
		{"log", "log", "how much to log: error, warn, info or debug", func(v string) error { return parseLevel(v, &s.level) }},
		{"server-addr", "server_addr", "where to listen: vsock://-1:1024 for the host, or unix:///path for root in the guest", func(v string) error { return parseListen(v, &s.listen) }},
		{"hotplug-timeout", "hotplug_timeout", "how long to wait for a disk that is being plugged in, such as 3 or 3s", func(v string) error { return parseDuration(v, &s.hotplug) }},
		{"resize-wait", "directvol.resize_wait", "how long ResizeVolume waits for the disk's new size, such as 1.5s", func(v string) error { return parseDuration(v, &s.resizeWait) }},
		{"state", "directvol.state", "the file, on a tmpfs, in which a service keeps who holds which storage, to survive its restart", func(v string) error { return parsePath(v, &s.state) }},
		{"poweroff", "directvol.poweroff", "on: power the VM off after DestroySandbox; as PID 1 only", func(v string) error { return parseSwitch(v, &s.powerOff) }},
	}
}

type option struct {
	flag, kernel, usage string
	set                 func(string) error
}

// fromKernel reads a kernel command line. Options of Kata's agent that this one
// has no use for are passed over; all that are wrong are named in the error.
func (s *settings) fromKernel(line string) error {
	var errs []error
	for word := range strings.FieldsSeq(line) {
		key, value, _ := strings.Cut(word, "=")
		for _, o := range s.options() {
			if key != "agent."+o.kernel {
				continue
			}
			if err := o.set(value); err != nil {
				errs = append(errs, fmt.Errorf("kernel command line: %s: %w", word, err))
			}
		}
	}
	return errors.Join(errs...)
}

// define adds a flag for each option.
func (s *settings) define(flags *flag.FlagSet) {
	for _, o := range s.options() {
		flags.Func(o.flag, o.usage+" (kernel command line: agent."+o.kernel+"=)", o.set)
	}
}

// parseDuration reads "1.5s", or "3" as seconds, which is how Kata writes it.
func parseDuration(v string, to *time.Duration) error {
	if _, err := strconv.ParseFloat(v, 64); err == nil {
		v += "s"
	}
	d, err := time.ParseDuration(v)
	if err != nil || d <= 0 {
		return fmt.Errorf("%.40q is no positive duration, such as 1.5s", v)
	}
	*to = d
	return nil
}

func parseLevel(v string, to *logrus.Level) error {
	level, err := logrus.ParseLevel(v)
	if err == nil {
		*to = level
	}
	return err
}

// parseListen reads an address. The CID of a vsock one is of no account; Kata
// writes it as -1.
func parseListen(v string, to *address.Address) error {
	listen, err := address.Parse(strings.Replace(v, "vsock://-1:", "vsock://0:", 1))
	if err != nil {
		return err
	}
	if listen.Scheme == address.HVSock {
		return fmt.Errorf("%s is a host's side of vsock: an agent listens on vsock:// or unix://", v)
	}
	*to = listen
	return nil
}

func parsePath(v string, to *string) error {
	if !filepath.IsAbs(v) {
		return fmt.Errorf("%.80q is no absolute path", v)
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
