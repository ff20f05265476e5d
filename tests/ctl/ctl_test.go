package ctl

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

const (
	volumeBytes = 64 << 20
	grownBytes  = 2 * volumeBytes
)

// TestAgentCtlTalksToBothAgents boots one guest with one volume, mounted by our agent. Kata's agent
// runs in the same guest and sees the same mount.
func TestAgentCtlTalksToBothAgents(t *testing.T) {
	program := built(t)
	ctx := vmtest.Within(t, vmtest.JobLimit)
	g := vmtest.Boot(t, vm.Options{})
	v, err := g.Volume(ctx, "volume", "ext4", volumeBytes)
	vmtest.Must(t, err)
	vmtest.Must(t, v.Mount(ctx))

	t.Run("directvol-agent", func(t *testing.T) {
		ctl := ctl{t, ctx, program, g.VM().AgentAddress()}
		ctl.speaks(v)
		answersOf(t, ctx, placeOf(t, ctx, g, "ours", ctl.agent, v.GuestPath))
		vmtest.Must(t, g.VM().ResizeDisk(ctx, v.DiskID(), grownBytes))
		ctl.begins("ResizeVolume\n  bytes: total 1", // and some MiB
			fmt.Sprintf(`ResizeVolume json://{"volume_guest_path":%q,"size":%d}`, v.GuestPath, grownBytes))
		if total := ctl.total(v.GuestPath); total <= volumeBytes {
			t.Errorf("total after ResizeVolume\nwant more than %d bytes\ngot  %d", volumeBytes, total)
		}
		ctl.serves(v)
		ctl.fails("NOT_FOUND", `GetVolumeStats json://{"volume_guest_path":"/no/such"}`)
		ctl.fails("OUT_OF_RANGE", fmt.Sprintf(`ResizeVolume json://{"volume_guest_path":%q,"size":4096}`, v.GuestPath))
	})

	t.Run("kata-agent", func(t *testing.T) {
		kata := os.Getenv("KATA_AGENT")
		if kata == "" {
			t.Skip("no kata-agent to talk to: build one from Kata Containers' sources (src/agent) or take it from a release, and run: KATA_AGENT=/path/to/kata-agent go test ./tests/ctl")
		}
		once, end := context.WithCancel(ctx)
		_, err := g.StartKata(once, kata)
		end()
		vmtest.Must(t, err)
		to, err := g.StartKata(ctx, kata) // again, in place of the first
		vmtest.Must(t, err)
		ctl := ctl{t, ctx, program, to}
		ctl.speaks(v)
		answersOf(t, ctx, placeOf(t, ctx, g, "kata", to, v.GuestPath))
		volumes := volumesOf(t, ctx, g)
		compareFields(t, ask(t, ctx, g.VM().AgentAddress(), volumes), ask(t, ctx, to, volumes))
		ctl.fails("UNIMPLEMENTED", fmt.Sprintf(`ResizeVolume json://{"volume_guest_path":%q,"size":%d}`, v.GuestPath, grownBytes))
		ctl.fails("INVALID_ARGUMENT", `PauseContainer json://{"container_id":"/"}`)
		if out, _, _ := ctl.run("-c", "ListInterfaces"); !strings.Contains(out, "name: lo\n") {
			t.Errorf("want the interface lo\ngot  %s", out)
		}
		if out, _, _ := ctl.run("-c", "GetMetrics"); !strings.Contains(out, "\n    # TYPE kata_agent_") {
			t.Errorf("want Prometheus' text, line by line\ngot  %s", out)
		}
	})
	vmtest.Must(t, v.Detach(ctx))
	vmtest.Must(t, vmtest.PowerOff(g))
}

// built returns the path of the program.
func built(t *testing.T) string {
	t.Helper()
	build, err := vm.FindBuild()
	vmtest.Must(t, err)
	program := filepath.Join(build.Dir, "agent-ctl")
	if _, err := os.Stat(program); err != nil {
		t.Fatalf("%v: run make build", err)
	}
	return program
}

// ctl runs agent-ctl with one agent.
type ctl struct {
	*testing.T
	ctx     context.Context
	program string
	agent   string
}

// run returns both outputs and the exit status.
func (c ctl) run(args ...string) (stdout, stderr string, exit int) {
	c.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(c.ctx, c.program, append([]string{"connect", "--server-address", c.agent}, args...)...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if _, failed := errors.AsType[*exec.ExitError](err); err != nil && !failed {
		c.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// ok makes calls, and checks that the answers are text.
func (c ctl) ok(text string, calls ...string) {
	c.Helper()
	var args []string
	for _, call := range calls {
		args = append(args, "-c", call)
	}
	if out, errs, exit := c.run(args...); out != text || errs != "" || exit != 0 {
		c.Errorf("%v\nwant %s\ngot  %s%s(exit %d)", calls, text, out, errs, exit)
	}
}

// begins makes a call, and checks that the answer begins with text.
func (c ctl) begins(text, call string) {
	c.Helper()
	if out, errs, exit := c.run("-c", call); !strings.HasPrefix(out, text) || errs != "" || exit != 0 {
		c.Errorf("%s\nwant %s…\ngot  %s%s(exit %d)", call, text, out, errs, exit)
	}
}

// fails makes a call, and checks that the agent refuses it with a code.
func (c ctl) fails(code, call string) {
	c.Helper()
	method, _, _ := strings.Cut(call, " ")
	if out, errs, exit := c.run("-c", call); out != "" || !strings.HasPrefix(errs, method+": "+code+": ") || exit != 1 {
		c.Errorf("%s\nwant %s, exit 1\ngot  %s%s(exit %d)", call, code, out, errs, exit)
	}
}

// speaks makes the calls that both agents answer alike.
func (c ctl) speaks(v *vm.Volume) {
	c.Helper()
	c.ok("Check\n  status: SERVING\nCheck\n  status: SERVING\n", "check", "Check json://{}")
	if out, errs, exit := c.run("--json", "-c", "Version", "-c", `GetGuestDetails json://{"mem_block_size":true,"mem_hotplug_probe":true}`); exit != 0 ||
		!strings.HasPrefix(out, `{"method":"Version","response":{"grpc_version":"0.0.1","agent_version":"`) ||
		!strings.Contains(out, "\n"+`{"method":"GetGuestDetails","response":{"mem_block_size_bytes":`) {
		c.Errorf("Version and GetGuestDetails: %s%s(exit %d)", out, errs, exit)
	}
	sizes, err := v.Sizes(c.ctx)
	vmtest.Must(c.T, err)
	if total := c.total(v.GuestPath); total != sizes.FSBytes {
		c.Errorf("total of the volume\nwant %d bytes, as statfs has it\ngot  %d", sizes.FSBytes, total)
	}
	if out, _, exit := c.run("-c", fmt.Sprintf(`GetVolumeStats json://{"volume_guest_path":%q}`, v.GuestPath)); exit != 0 ||
		!strings.Contains(out, fmt.Sprintf("  bytes: total %v, ", output.Size(sizes.FSBytes))) || !strings.Contains(out, "  condition: normal: OK\n") {
		c.Errorf("GetVolumeStats as text: %s(exit %d)", out, exit)
	}
	c.hybrid()
}

// hybrid reaches the agent by an address in the form of Kata's tool.
func (c ctl) hybrid() {
	c.Helper()
	to, err := address.Parse(c.agent)
	vmtest.Must(c.T, err)
	if to.Scheme != address.HVSock {
		return // this host's kernel offers vsock
	}
	c.agent = "unix://" + to.Path
	if out, errs, exit := c.run("--hybrid-vsock", "--hybrid-vsock-port", fmt.Sprint(to.Port), "-c", "Check"); exit != 0 || out != "Check\n  status: SERVING\n" {
		c.Errorf("--hybrid-vsock: %s%s(exit %d)", out, errs, exit)
	}
}

// total returns a volume's size in bytes, from JSON.
func (c ctl) total(path string) uint64 {
	c.Helper()
	out, errs, exit := c.run("--json", "-c", fmt.Sprintf(`GetVolumeStats json://{"volume_guest_path":%q}`, path))
	var answer struct {
		Response struct {
			Usage []struct {
				Unit  string
				Total uint64
			}
		}
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil || exit != 0 {
		c.Fatalf("stats of %s: %s%s(exit %d, %v)", path, out, errs, exit, err)
	}
	for _, usage := range answer.Response.Usage {
		if usage.Unit == "BYTES" {
			return usage.Total
		}
	}
	c.Fatalf("stats of %s have no bytes: %s", path, out)
	return 0
}
