package main

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/agent/contract"
	"github.com/directvol/directvol/agent/rpc"
	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/program/programtest"
	"github.com/directvol/directvol/tools/agent-ctl/message"
)

func TestEveryMethodHasAnExampleThatParses(t *testing.T) {
	for _, m := range allMethods() {
		e, ok := examples[m.Method]
		if !ok || e.does == "" {
			t.Errorf("%s has no example", m.Method)
		}
		c, err := parseCall(e.command(m.Method))
		if err != nil {
			t.Errorf("%s: %v", m.Method, err)
		} else if e.request != "" && proto.Size(c.request) == 0 {
			t.Errorf("%s: the example's request says nothing", m.Method)
		}
		if strings.Contains(e.request, "'") {
			t.Errorf("%s: a shell ends the example at its single quote", m.Method)
		}
	}
	same(t, "examples", len(allMethods()), len(examples))
}

func TestExampleHasNoFieldThatTheAgentRefuses(t *testing.T) {
	for _, method := range []string{"CreateSandbox", "CreateContainer", "RemoveContainer"} { // those with a contract
		c, err := parseCall(examples[method].command(method))
		if err == nil {
			err = contract.Check(c.request)
		}
		if err != nil {
			t.Errorf("%s: %v", method, err)
		}
	}
}

func TestMethodsThatTheAgentLacksAreMarked(t *testing.T) {
	has := rpc.Methods()
	for _, m := range allMethods() {
		if want := slices.Contains(has[m.Service], m.Method); ours[m.Method] != want {
			t.Errorf("%s is in directvol's agent\nwant %v\ngot  %v", m.Method, want, ours[m.Method])
		}
	}
	const mark = "[not in directvol's agent]"
	for _, verb := range []string{"list", "examples"} {
		same(t, verb+" StartContainer", true, strings.Contains(ctl(t.Context(), verb, "StartContainer").Stdout, mark))
		same(t, verb+" GetVolumeStats", false, strings.Contains(ctl(t.Context(), verb, "GetVolumeStats").Stdout, mark))
	}
}

func TestExamplesAreWrittenToBeCopied(t *testing.T) {
	got := ctl(t.Context(), "examples")
	same(t, "exit", program.OK, got.Exit)
	a := newAgent(t, empty)
	args := []string{}
	for line := range strings.Lines(got.Stdout) {
		if command, ok := strings.CutPrefix(line, "-c '"); ok {
			args = append(args, "-c", strings.TrimSuffix(command, "'\n"))
		}
	}
	same(t, "examples", 2*len(allMethods()), len(args))
	same(t, "exit of all of them", program.OK, connect(t, a, args...).Exit)
}

func TestListShowsEveryMethodAndField(t *testing.T) {
	got := ctl(t.Context(), "list")
	same(t, "exit", program.OK, got.Exit)
	for _, m := range allMethods() {
		_, own, found := strings.Cut("\n"+got.Stdout, "\n"+m.Method+" ("+m.Service+"): ")
		if !found {
			t.Errorf("%s is not listed", m.Method)
			continue
		}
		own, _, _ = strings.Cut(own, "\n\n")
		same(t, m.Method+" answers a stream", m.Streams, strings.Contains(own, "\n  answers a stream of "))
		for _, described := range message.Describe(m.NewRequest(), m.NewResponse())[:2] {
			for _, f := range described.Fields {
				if !strings.Contains(own, "\n    "+f.Name+" ") {
					t.Errorf("%s: field %s is not listed", m.Method, f.Name)
				}
			}
		}
	}
	if strings.Contains(got.Stdout, "\n  VolumeUsage\n") {
		t.Error("messages inside are listed though no method was named")
	}
}

func TestListOfNamedMethodsShowsWhatIsInside(t *testing.T) {
	got := ctl(t.Context(), "list", "getvolumestats")
	same(t, "list", programtest.Result{Stdout: `GetVolumeStats (grpc.AgentService): usage and condition of a volume
  takes VolumeStatsRequest
    volume_guest_path  string
  answers VolumeStatsResponse
    usage             repeated VolumeUsage
    volume_condition  VolumeCondition
  VolumeUsage
    available  uint64
    total      uint64
    used       uint64
    unit       UNKNOWN|BYTES|INODES
  VolumeCondition
    abnormal  bool
    message   string
`}, got)
}

func TestShellCompletesMethodNames(t *testing.T) {
	for _, args := range [][]string{{"connect", "-c", "getvolumes"}, {"connect", "--cmd", "GetVolumeS"}, {"list", "GetVolumeS"}, {"examples", "getvolumes"}} {
		got := ctl(t.Context(), append([]string{"__complete"}, args...)...)
		want := "GetVolumeStats\tusage and condition of a volume\n:4\n"
		same(t, strings.Join(args, " "), want, got.Stdout)
	}
	got := ctl(t.Context(), "__complete", "connect", "--server-address", "")
	same(t, "addresses", "vsock://\nhvsock:///\nunix:///\nunix://@/\n:6\n", got.Stdout)
	if got := ctl(t.Context(), "completion", "bash"); got.Exit != program.OK || !strings.Contains(got.Stdout, "agent-ctl") {
		t.Errorf("bash's completion: %+v", got)
	}
}

func TestHelpTeachesByExample(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"connect", "--help"}, {"list", "--help"}, {"examples", "--help"}} {
		got := ctl(t.Context(), args...)
		if got.Exit != program.OK || !strings.Contains(got.Stdout, "Examples:\n  agent-ctl ") {
			t.Errorf("%v: want exit 0 and examples\ngot  %+v", args, got)
		}
	}
}

func FuzzParseCall(f *testing.F) {
	for method, e := range examples {
		f.Add(e.command(method))
	}
	f.Add("Check json://{")
	f.Add(" check\tfile://")
	f.Fuzz(func(t *testing.T, command string) {
		if strings.Contains(command, "file://") {
			return // it may name a device
		}
		if c, err := parseCall(command); err == nil && (c.request == nil || c.Method == "") {
			t.Errorf("%q: neither call nor error", command)
		}
	})
}
