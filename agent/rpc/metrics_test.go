package rpc

import (
	"errors"
	"strings"
	"testing"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/frame"
)

func TestEveryCallIsCountedHoweverItIsAnswered(t *testing.T) {
	a := newAgent()
	services := a.services()
	call := func(service, method string, decoded error) {
		t.Helper()
		if _, err := services[service][method](t.Context(), func(any) error { return decoded }); (err == nil) != (decoded == nil && method == "Check") {
			t.Errorf("%s: error %v", method, err)
		}
	}
	call(agentpb.HealthServiceName, "Check", nil)
	for range 2 {
		if _, ok := a.Quick(&frame.Request{Service: []byte(agentpb.HealthServiceName), Method: []byte("Check")}); !ok {
			t.Fatal("Check is not quick")
		}
	}
	a.Quick(&frame.Request{Service: []byte(agentpb.AgentServiceName), Method: []byte("made\nup")})
	call(agentpb.AgentServiceName, "GetVolumeStats", nil) // of no path
	call(agentpb.AgentServiceName, "GetVolumeStats", errors.New("does not decode"))
	answer, err := a.getMetrics(t.Context(), &agentpb.GetMetricsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`directvol_agent_info{version="1"} 1`,
		`directvol_agent_calls_total{method="Check",code="OK"} 3`,
		`directvol_agent_calls_total{method="GetVolumeStats",code="InvalidArgument"} 2`,
		`directvol_agent_call_duration_seconds_count{method="Check"} 1`,
		`directvol_agent_volumes{driver="blk"} 0`,
		`directvol_agent_volumes_abnormal 0`,
	} {
		if !strings.Contains("\n"+answer.Metrics, "\n"+want+"\n") {
			t.Errorf("want %s\ngot\n%s", want, answer.Metrics)
		}
	}
	if strings.Contains(answer.Metrics, "made") {
		t.Errorf("a method of the caller's making is a label:\n%s", answer.Metrics)
	}
}

func TestEveryStatusHasAName(t *testing.T) {
	for status := health.Degraded; status <= health.DataLoss; status++ {
		if statusNames[status] == "" {
			t.Errorf("status %d has none", status)
		}
	}
}
