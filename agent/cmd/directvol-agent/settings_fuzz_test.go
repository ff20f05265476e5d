package main

import (
	"strings"
	"testing"

	"github.com/directvol/directvol/protocols/address"
)

// FuzzKernelCommandLine checks that the settings parsed from any line are valid, the same when the
// line is parsed again, and unaffected by words of other programs.
func FuzzKernelCommandLine(f *testing.F) {
	for _, line := range []string{
		"console=ttyS0 agent.log=debug agent.hotplug_timeout=7 agent.directvol.resize_wait=250ms agent.directvol.poweroff=on quiet\n",
		"agent.server_addr=vsock://-1:1025", "agent.server_addr=unix:///run/dv.sock", "agent.server_addr=hvsock:///x:1",
		"agent.hotplug_timeout=1e300 agent.hotplug_timeout=0x1p4 agent.hotplug_timeout=NaN agent.hotplug_timeout=-0",
		"agent.directvol.resize_wait=2540400h10m10.000000001s agent.log=loud agent.log agent.=", "agent.hotplug_timeout=.5 agent.hotplug_timeout=1_0",
	} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		set := defaults()
		err := set.fromKernel(line)
		if set.hotplug <= 0 || set.resizeWait <= 0 || set.listen.Scheme != address.VSock && set.listen.Scheme != address.Unix {
			t.Errorf("%q set %+v", line, set)
		}
		if again, parseErr := address.Parse(set.listen.String()); parseErr != nil || again != set.listen {
			t.Errorf("%q\nwant to listen at %v\ngot  %v, error %v", line, set.listen, again, parseErr)
		}
		again := set
		if againErr := again.fromKernel(line); again != set || (againErr == nil) != (err == nil) {
			t.Errorf("%q read again\nwant %+v, error %v\ngot  %+v, error %v", line, set, err, again, againErr)
		}
		var ours []string
		for word := range strings.FieldsSeq(line) {
			if strings.HasPrefix(word, "agent.") {
				ours = append(ours, word)
			}
		}
		alone := defaults()
		if aloneErr := alone.fromKernel(strings.Join(ours, " ")); alone != set || (aloneErr == nil) != (err == nil) {
			t.Errorf("%q without foreign options\nwant %+v, error %v\ngot  %+v, error %v", line, set, err, alone, aloneErr)
		}
	})
}
