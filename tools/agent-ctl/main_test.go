package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/program/programtest"
)

func ctl(ctx context.Context, args ...string) programtest.Result {
	return programtest.Run(ctx, newRootCommand(), args...)
}

func connect(t *testing.T, a *agent, args ...string) programtest.Result {
	t.Helper()
	return ctl(t.Context(), append([]string{"connect", "--server-address", a.address}, args...)...)
}

func same(t *testing.T, what string, want, got any) {
	t.Helper()
	if want != got {
		t.Errorf("%s\nwant %v\ngot  %v", what, want, got)
	}
}

func TestEveryMethodIsCalledByItsName(t *testing.T) {
	a := newAgent(t, empty)
	for _, m := range allMethods() {
		before, _ := a.seen()
		got := connect(t, a, "--json", "-c", examples[m.Method].command(strings.ToLower(m.Method)))
		same(t, m.Method+"\nexit", program.OK, got.Exit)
		var answer struct {
			Method   string
			Response map[string]any
			Error    any
		}
		if err := json.Unmarshal([]byte(got.Stdout), &answer); err != nil || answer.Method != m.Method || answer.Response == nil || answer.Error != nil {
			t.Errorf("%s: want an answer with a response\ngot  %s%s (%v)", m.Method, got.Stdout, got.Stderr, err)
		}
		if after, _ := a.seen(); !strings.HasPrefix(strings.TrimPrefix(after[len(before):], "\n"), m.Method+" {") {
			t.Errorf("want the agent to be called %s\ngot  %s", m.Method, after[len(before):])
		}
	}
}

func TestCallsGoInOrderOverOneConnection(t *testing.T) {
	a := newAgent(t, empty)
	file := filepath.Join(t.TempDir(), "request.json")
	if err := os.WriteFile(file, []byte(`{"volume_guest_path": "/b", "size": 1}`+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := connect(t, a, "-c", "Check", "-c", `GetVolumeStats json://{"volume_guest_path":"/a, b"}`, "-c", "ResizeVolume  file://"+file, "-c", "Version")
	same(t, "exit", program.OK, got.Exit)
	requests, connections := a.seen()
	same(t, "requests", `Check {"service":""}
GetVolumeStats {"volume_guest_path":"/a, b"}
ResizeVolume {"volume_guest_path":"/b","size":1}
GetVolumeStats {"volume_guest_path":"/b"}
Version {"service":""}`, requests)
	same(t, "connections", 1, connections)
}

func TestEveryAddressReachesTheAgent(t *testing.T) {
	dir := t.TempDir()
	path, hybridPath := filepath.Join(dir, "s"), filepath.Join(dir, "h")
	abstract := fmt.Sprintf("@/directvol/agent-ctl/%d", os.Getpid())
	serve(t, listen(t, path), "", empty)
	serve(t, hybrid{listen(t, hybridPath), 1024}, "", empty)
	serve(t, listen(t, abstract), "", empty)
	for _, args := range [][]string{
		{"--server-address", "unix://" + path},
		{"--server-address", "unix://" + abstract},
		{"--server-address", "hvsock://" + hybridPath + ":1024"},
		{"--server-address", "unix://" + hybridPath, "--hybrid-vsock"},
		{"--server-address", "unix://" + hybridPath, "--hybrid-vsock", "--hybrid-vsock-port", "1024"},
		{"--server-address", "unix://" + hybridPath, "--hybrid-vsock", "true"}, // as kata-agent-ctl accepts it
		{"--server-address", "unix://" + hybridPath, "--hybrid-vsock=true"},
		{"--server-address", "unix://" + path, "--hybrid-vsock", "false"},
	} {
		got := ctl(t.Context(), append([]string{"connect", "-c", "Check"}, args...)...)
		same(t, fmt.Sprint(args), programtest.Result{Stdout: "Check\n  status: UNKNOWN\n"}, got)
	}
	got := ctl(t.Context(), "connect", "-c", "Check", "--server-address", "unix://"+hybridPath, "--hybrid-vsock", "--hybrid-vsock-port", "1025")
	if got.Exit != program.Failed || !strings.Contains(got.Stderr, "1025") {
		t.Errorf("another port\nwant exit 1 and the port named\ngot  %+v", got)
	}
}

func TestHybridSocketWithoutItsFlagIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "h")
	serve(t, hybrid{listen(t, path), 1024}, "", empty)
	got := ctl(t.Context(), "connect", "-c", "Check", "--server-address", "unix://"+path)
	if got.Exit != program.Failed || !strings.Contains(got.Stderr, "CONNECT") || !strings.Contains(got.Stderr, "--hybrid-vsock") {
		t.Errorf("want exit 1, and the flag that is missing\ngot  %+v", got)
	}
}

// A growth with an unknown result is not reported as a growth to a size.
func TestResizeWithoutStatsIsOK(t *testing.T) {
	a := newAgent(t, func(_ context.Context, method string, _ proto.Message) (proto.Message, error) {
		if method == "GetVolumeStats" {
			return nil, status.Error(codes.NotFound, "no volume")
		}
		return nil, nil
	})
	same(t, "text", programtest.Result{Stdout: "ResizeVolume: OK\n"}, connect(t, a, "-c", `ResizeVolume json://{"size":3}`))
	same(t, "JSON", programtest.Result{Stdout: `{"method":"ResizeVolume","response":{}}` + "\n"}, connect(t, a, "--json", "-c", `ResizeVolume json://{"size":3}`))
}

func TestAnswersAreReadable(t *testing.T) {
	a := newAgent(t, func(_ context.Context, method string, _ proto.Message) (proto.Message, error) {
		switch method {
		case "GetVolumeStats":
			return &agentpb.VolumeStatsResponse{
				Usage: []*agentpb.VolumeUsage{
					{Unit: agentpb.VolumeUsage_BYTES, Total: 2 << 30, Used: 1 << 29, Available: 3 << 29},
					{Unit: agentpb.VolumeUsage_INODES, Total: 65536, Used: 11, Available: 65525},
				},
				VolumeCondition: &agentpb.VolumeCondition{Abnormal: true, Message: "broken\x1b[2J\nindeed"},
			}, nil
		case "GetMetrics":
			return &agentpb.Metrics{Metrics: "# HELP a b\na 1\x07\n"}, nil
		}
		return nil, nil
	})
	got := connect(t, a, "-c", "GetVolumeStats", "-c", `ResizeVolume json://{"size": 3221225472}`, "-c", "GetMetrics", "-c", "CreateSandbox")
	same(t, "answers", programtest.Result{Stdout: `GetVolumeStats
  bytes: total 2.0 GiB, used 512.0 MiB, available 1.5 GiB
  inodes: total 65536, used 11, available 65525
  condition: abnormal: broken [2J indeed
ResizeVolume
  bytes: total 2.0 GiB, used 512.0 MiB, available 1.5 GiB
  inodes: total 65536, used 11, available 65525
  condition: abnormal: broken [2J indeed
GetMetrics
  metrics:
    # HELP a b
    a 1` + " " + `
CreateSandbox: OK
`}, got)
	got = connect(t, a, "--json", "-c", "GetVolumeStats", "-c", "CreateSandbox")
	same(t, "JSON", `{"method":"GetVolumeStats","response":{"usage":[`+
		`{"available":1610612736,"total":2147483648,"used":536870912,"unit":"BYTES"},{"available":65525,"total":65536,"used":11,"unit":"INODES"}],`+
		`"volume_condition":{"abnormal":true,"message":"broken\u001b[2J\nindeed"}}}`+"\n"+`{"method":"CreateSandbox","response":{}}`+"\n", got.Stdout)
}

func refusing(code codes.Code, text string) func(context.Context, string, proto.Message) (proto.Message, error) {
	return func(_ context.Context, method string, _ proto.Message) (proto.Message, error) {
		if method == "Check" {
			return nil, nil
		}
		return nil, status.Error(code, text)
	}
}

func TestErrorHasItsCodesNameAndEndsTheRun(t *testing.T) {
	a := newAgent(t, refusing(codes.NotFound, "no volume \x1b[31m"))
	got := connect(t, a, "-c", "GetVolumeStats", "-c", "Check")
	same(t, "text", programtest.Result{Exit: program.Failed, Stderr: "GetVolumeStats: NOT_FOUND: no volume  [31m\n"}, got)
	got = connect(t, a, "--json", "-c", "GetVolumeStats", "-c", "Check")
	same(t, "JSON", programtest.Result{Exit: program.Failed, Stdout: `{"method":"GetVolumeStats","error":{"code":"NOT_FOUND","message":"no volume \u001b[31m"}}` + "\n"}, got)
	got = connect(t, a, "--ignore-errors", "-c", "GetVolumeStats", "-c", "Check")
	same(t, "ignored", programtest.Result{Exit: program.Failed, Stdout: "Check\n  status: UNKNOWN\n", Stderr: "GetVolumeStats: NOT_FOUND: no volume  [31m\n"}, got)
}

// Package codes can parse these names, though it does not print them.
func TestEveryCodeHasItsName(t *testing.T) {
	for i, name := range codeNames {
		var code codes.Code
		if err := json.Unmarshal([]byte(`"`+name+`"`), &code); err != nil || int(code) != i {
			t.Errorf("code %d\nwant its name\ngot  %s (%v)", i, name, err)
		}
	}
	same(t, "a code that gRPC lacks", "CODE_4000000000", codeName(4000000000))
}

func TestWrongCommandLineIsUsageAndMakesNoCall(t *testing.T) {
	a := newAgent(t, empty)
	to := []string{"connect", "--server-address", a.address}
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"no call":             {to, "-c"},
		"no address":          {[]string{"connect", "-c", "Check"}, "--server-address"},
		"bad address":         {[]string{"connect", "-c", "Check", "--server-address", "tcp://x"}, "tcp"},
		"hybrid vsock's":      {[]string{"connect", "-c", "Check", "--server-address", "vsock://3:1024", "--hybrid-vsock"}, "unix://"},
		"hybrid abstract":     {[]string{"connect", "-c", "Check", "--server-address", "unix://@/x", "--hybrid-vsock"}, "absolute"},
		"unknown method":      {append(to, "-c", "Check", "-c", "Chekc"), "agent-ctl list"},
		"unknown field":       {append(to, "-c", "Check", "-c", `ResizeVolume json://{"sise":1}`), `unknown field "sise": ResizeVolumeRequest has volume_guest_path, size`},
		"no JSON":             {append(to, "-c", "Check json://{"), "EOF"},
		"neither json nor":    {append(to, "-c", "Check {}"), "json://"},
		"no such file":        {append(to, "-c", "Check file:///no/such"), "/no/such"},
		"repeat":              {append(to, "-c", "Check", "--repeat", "0"), "--repeat"},
		"interval":            {append(to, "-c", "Check", "--interval", "-1s"), "--interval"},
		"timeout":             {append(to, "-c", "Check", "--timeout", "-1s"), "--timeout"},
		"unknown flag":        {append(to, "--fast"), "--fast"},
		"flag's argument":     {append(to, "-c", "Check", "true"), "true"},
		"argument":            {append(to, "-c", "Check", "Version"), "Version"},
		"unknown command":     {[]string{"conect"}, "conect"},
		"list what is not":    {[]string{"list", "Chekc"}, "Chekc"},
		"example of what not": {[]string{"examples", "Chekc"}, "Chekc"},
	} {
		got := ctl(t.Context(), c.args...)
		if got.Exit != program.WrongUsage || got.Stdout != "" || !strings.Contains(got.Stderr, c.says) || !strings.Contains(got.Stderr, "--help") {
			t.Errorf("%s\nwant exit 2, and %q on the standard error\ngot  %+v", name, c.says, got)
		}
	}
	requests, connections := a.seen()
	same(t, "requests", "", requests)
	same(t, "connections", 0, connections)
}

func TestAgentThatIsNotThereIsAFailure(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none")
	got := ctl(t.Context(), "connect", "--server-address", "unix://"+path, "-c", "Check")
	if got.Exit != program.Failed || !strings.Contains(got.Stderr, path) {
		t.Errorf("want exit 1 and the address\ngot  %+v", got)
	}
}

// hanging does not answer during the test; it signals on asked that it received a call.
func hanging(t *testing.T) (a *agent, asked chan struct{}) {
	asked = make(chan struct{}, 10)
	return newAgent(t, func(context.Context, string, proto.Message) (proto.Message, error) {
		asked <- struct{}{}
		<-t.Context().Done()
		return nil, errors.New("too late to be read")
	}), asked
}

// limited runs agent-ctl with a time-out that is doubled while the machine is too busy to connect
// in it: the time-out limits connecting, too.
func limited(t *testing.T, server string, args ...string) (got programtest.Result, timeout time.Duration) {
	for timeout = 50 * time.Millisecond; ; timeout *= 2 {
		got = ctl(t.Context(), append([]string{"connect", "--server-address", server, "--timeout", timeout.String()}, args...)...)
		if !strings.HasPrefix(got.Stderr, "agent-ctl: dial ") || timeout > time.Minute {
			return got, timeout
		}
	}
}

func TestTimeoutLimitsACall(t *testing.T) {
	a, _ := hanging(t)
	got, timeout := limited(t, a.address, "-c", "GetOOMEvent")
	if got.Exit != program.Failed || !strings.Contains(got.Stderr, "DEADLINE_EXCEEDED: no answer within "+timeout.String()) {
		t.Errorf("want exit 1 and DEADLINE_EXCEEDED\ngot  %+v", got)
	}
}

func TestAgentThatDoesNotReadIsGivenUp(t *testing.T) {
	l := listen(t, filepath.Join(t.TempDir(), "s"))
	defer l.Close()
	file := filepath.Join(t.TempDir(), "request.json")
	long := fmt.Sprintf(`{"policy":%q}`, strings.Repeat("x", 3<<20)) // more than any socket's buffer
	if err := os.WriteFile(file, []byte(long), 0o600); err != nil {
		t.Fatal(err)
	}
	got, _ := limited(t, "unix://"+l.Addr().String(), "-c", "SetPolicy file://"+file)
	if got.Exit != program.Failed || !strings.Contains(got.Stderr, "DEADLINE_EXCEEDED") {
		t.Errorf("want exit 1 and DEADLINE_EXCEEDED\ngot  %+v", got)
	}
}

func TestInterruptEndsACallThatHangs(t *testing.T) {
	a, asked := hanging(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	got := ctl(ctx, "connect", "--server-address", a.address, "--timeout", "0", "--json", "-c", "WaitProcess", "-c", "Check")
	same(t, "interrupted", programtest.Result{Exit: program.Interrupted, Stdout: `{"method":"WaitProcess","error":{"code":"CANCELLED","message":"interrupted"}}` + "\n", Stderr: "agent-ctl: interrupted\n"}, got)
}

func TestConnectionThatEndsEndsTheRun(t *testing.T) {
	l := listen(t, filepath.Join(t.TempDir(), "s"))
	defer l.Close()
	go func() {
		conn, err := l.Accept()
		if err == nil {
			conn.Read(make([]byte, 1))
			conn.Close()
		}
	}()
	got := ctl(t.Context(), "connect", "--server-address", "unix://"+l.Addr().String(), "--ignore-errors", "--repeat", "-1", "-c", "Check")
	if got.Exit != program.Failed || strings.Count(got.Stderr, "UNAVAILABLE") != 1 {
		t.Errorf("want exit 1 and UNAVAILABLE once\ngot  %+v", got)
	}
}

func TestRepeatMakesAllCallsAgain(t *testing.T) {
	a := newAgent(t, empty)
	got := connect(t, a, "--repeat", "3", "--interval", "1ms", "-c", "Check", "-c", "DestroySandbox")
	same(t, "exit", program.OK, got.Exit)
	requests, connections := a.seen()
	same(t, "requests", strings.TrimSpace(strings.Repeat("Check {\"service\":\"\"}\nDestroySandbox {}\n", 3)), requests)
	same(t, "connections", 1, connections)
}

func TestRepetitionWithoutEndEndsWithAnInterrupt(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	calls := 0
	a := newAgent(t, func(context.Context, string, proto.Message) (proto.Message, error) {
		if calls++; calls == 20 {
			cancel()
		}
		return nil, nil
	})
	got := ctl(ctx, "connect", "--server-address", a.address, "--repeat", "-1", "-c", "Check")
	same(t, "exit", program.Interrupted, got.Exit)
	if requests, _ := a.seen(); strings.Count(requests, "Check") < 20 {
		t.Errorf("want 20 calls or more\ngot  %s", requests)
	}
}

func TestMalformedAnswerIsInternal(t *testing.T) {
	a := newAgent(t, func(context.Context, string, proto.Message) (proto.Message, error) {
		return &agentpb.Metrics{Metrics: "text"}, nil
	})
	got := connect(t, a, "-c", "Check")
	if got.Exit != program.Failed || !strings.Contains(got.Stderr, "INTERNAL") {
		t.Errorf("want exit 1 and INTERNAL\ngot  %+v", got)
	}
}
