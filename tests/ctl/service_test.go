package ctl

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// running is an agent-ctl that has not ended.
type running struct {
	ctl
	cmd   *exec.Cmd
	lines *bufio.Scanner
}

// start runs agent-ctl, which ends with the test at the latest.
func (c ctl) start(command string, args ...string) running {
	c.Helper()
	cmd := exec.CommandContext(c.ctx, c.program, append([]string{command, "--server-address", c.agent, "--json"}, args...)...)
	out, err := cmd.StdoutPipe()
	vmtest.Must(c.T, err)
	vmtest.Must(c.T, cmd.Start())
	return running{c, cmd, bufio.NewScanner(out)}
}

// until returns the first line from now on that has all texts.
func (r running) until(texts ...string) string {
	r.Helper()
next:
	for r.lines.Scan() {
		for _, text := range texts {
			if !strings.Contains(r.lines.Text(), text) {
				continue next
			}
		}
		return r.lines.Text()
	}
	r.Fatalf("%v has ended without a line with %q: %v", r.cmd.Args, texts, r.lines.Err())
	return ""
}

// ends waits for the end of agent-ctl, and checks its exit status.
func (r running) ends(want int) {
	r.Helper()
	for r.lines.Scan() { // Wait closes the pipe
	}
	_ = r.cmd.Wait() // the status says it
	if got := r.cmd.ProcessState.ExitCode(); got != want {
		r.Errorf("%v\nwant exit %d\ngot  %d", r.cmd.Args, want, got)
	}
}

// serves makes the calls of directvol's own service, beside a watch, and ends before its leases.
func (c ctl) serves(v *vm.Volume) {
	c.Helper()
	c.ctx = vmtest.Within(c.T, time.Minute)
	path := fmt.Sprintf(`"volume_guest_path":%q`, v.GuestPath)
	c.begins("ListVolumes\n  volumes[0]:\n", "ListVolumes")
	c.begins("GetVolume\n  volume_guest_path: "+v.GuestPath+"\n", "GetVolume json://{"+path+"}")
	c.ok("SyncVolume: OK\n", "SyncVolume json://{"+path+"}")
	c.begins("TrimVolume\n  trimmed_bytes: ", "TrimVolume json://{"+path+"}")
	grown := c.start("connect", "-c", "GrowVolume json://{"+path+"}")
	grown.until(`"done":true`)
	grown.ends(program.OK)

	watch := c.start("watch")
	watch.until(path, `"frozen":false`)
	freeze := fmt.Sprintf(`FreezeVolumes json://{"volume_guest_paths":[%q],"lease_milliseconds":600000}`, v.GuestPath)
	frozen := c.start("connect", "--timeout", "0", "-c", freeze)
	frozen.until(`"consistency":"FROZEN"`)
	watch.until(path, `"frozen":true`)
	vmtest.Must(c.T, frozen.cmd.Process.Signal(syscall.SIGINT))
	frozen.ends(program.Interrupted)
	watch.until(path, `"frozen":false`)

	frozen = c.start("connect", "--timeout", "0", "-c", freeze)
	var answer struct{ Response struct{ Lease string } }
	vmtest.Must(c.T, json.Unmarshal([]byte(frozen.until(`"lease"`)), &answer))
	c.ok("ThawVolumes: OK\n", fmt.Sprintf(`ThawVolumes json://{"lease":%q}`, answer.Response.Lease))
	frozen.ends(program.OK)

	vmtest.Must(c.T, watch.cmd.Process.Signal(syscall.SIGINT))
	watch.ends(program.Interrupted)
}
