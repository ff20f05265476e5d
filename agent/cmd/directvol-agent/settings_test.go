package main

import (
	"flag"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/protocols/address"
)

func TestKernelCommandLineIsReadAsKataWritesIt(t *testing.T) {
	set := defaults()
	line := "console=ttyS0 agent.log=debug agent.hotplug_timeout=7 agent.directvol.resize_wait=250ms agent.directvol.poweroff=on agent.directvol.state=/run/x agent.unified_cgroup_hierarchy=1 quiet\n"
	if err := set.fromKernel(line); err != nil {
		t.Fatal(err)
	}
	want := settings{level: logrus.DebugLevel, listen: defaults().listen, hotplug: 7 * time.Second, resizeWait: 250 * time.Millisecond, powerOff: true, state: "/run/x"}
	if set != want {
		t.Errorf("\nwant %+v\ngot  %+v", want, set)
	}
}

func TestServerAddressIsKatas(t *testing.T) {
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
	for _, word := range []string{"agent.hotplug_timeout=-1", "agent.hotplug_timeout=soon", "agent.directvol.poweroff=maybe", "agent.log=loud", "agent.server_addr=hvsock:///x:1", "agent.server_addr=tcp://1:2", "agent.directvol.resize_wait=", "agent.directvol.state=run"} {
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

func TestFlagsWinOverTheKernelCommandLine(t *testing.T) {
	set := defaults()
	if err := set.fromKernel("agent.log=error"); err != nil {
		t.Fatal(err)
	}
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	set.define(flags)
	if err := flags.Parse([]string{"-log", "debug"}); err != nil || set.level != logrus.DebugLevel {
		t.Errorf("level %v, error %v", set.level, err)
	}
}
