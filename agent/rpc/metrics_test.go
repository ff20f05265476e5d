package rpc

import (
	"strings"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/protocols/agentpb"
)

func TestEveryCallIsCountedHoweverItIsAnswered(t *testing.T) {
	w := dial(t, newAgent())
	for _, call := range []struct {
		service, method string
		payload         []byte
		code            codes.Code
	}{
		{agentpb.HealthServiceName, "Check", nil, codes.OK},
		{agentpb.HealthServiceName, "Check", nil, codes.OK},
		{agentpb.HealthServiceName, "Check", []byte{0x0a, 0}, codes.OK}, // not answered in place
		{agentpb.AgentServiceName, "made\nup", nil, codes.Unimplemented},
		{agentpb.AgentServiceName, "GetVolumeStats", nil, codes.InvalidArgument},          // no path
		{agentpb.AgentServiceName, "GetVolumeStats", []byte{0xff}, codes.InvalidArgument}, // not decodable
	} {
		answer := w.exchange(w.request(&ttrpc.Request{Service: call.service, Method: call.method, Payload: call.payload}))
		if got := codes.Code(answer.Status.GetCode()); got != call.code {
			t.Errorf("%s %x\nwant %v\ngot  %v", call.method, call.payload, call.code, got)
		}
	}
	var answer agentpb.Metrics
	if err := answer.Unmarshal(w.exchange(w.frame("GetMetrics", &agentpb.GetMetricsRequest{})).Payload); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`directvol_agent_info{version="1"} 1`,
		`directvol_agent_calls_total{method="Check",code="OK"} 3`,
		`directvol_agent_calls_total{method="GetVolumeStats",code="InvalidArgument"} 2`,
		`directvol_agent_call_duration_seconds_count{method="Check"} 1`,
		`directvol_agent_volumes{driver="blk"} 0`,
		`directvol_agent_volumes_abnormal 0`,
		`directvol_agent_trimmed_bytes_total 0`,
	} {
		if !strings.Contains("\n"+answer.Metrics, "\n"+want+"\n") {
			t.Errorf("want %s\ngot\n%s", want, answer.Metrics)
		}
	}
	if strings.Contains(answer.Metrics, "made") {
		t.Errorf("an unknown method of a caller became a label:\n%s", answer.Metrics)
	}
}

func TestEveryStatusHasAName(t *testing.T) {
	for status, want := range map[health.Status]string{health.Degraded: "DEGRADED", health.Inaccessible: "INACCESSIBLE", health.DataLoss: "DATA_LOSS"} {
		if got := statusName(status); got != want {
			t.Errorf("status %d\nwant %s\ngot  %s", status, want, got)
		}
	}
}
