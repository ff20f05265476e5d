package volumes

import (
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/tests/vm"
)

// ask makes a call of AgentService that agentclient does not offer.
func ask[R any, PR service.Message[R]](t *testing.T, g *vm.Guest, method string, request proto.Message) (PR, error) {
	t.Helper()
	client := ttrpc.NewClient(dialPort(t, g, agentpb.Port))
	defer client.Close()
	return service.Call[R, PR](limited(t), client, agentpb.AgentServiceName, method, request)
}

// metrics returns the agent's samples, by name and labels in their text form.
func metrics(t *testing.T, g *vm.Guest) map[string]float64 {
	t.Helper()
	answer, err := ask[agentpb.Metrics](t, g, "GetMetrics", &agentpb.GetMetricsRequest{})
	must(t, err)
	values := map[string]float64{}
	for line := range strings.Lines(answer.Metrics) {
		if strings.HasPrefix(line, "# ") {
			continue
		}
		name, text, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		value, err := strconv.ParseFloat(text, 64)
		if !ok || err != nil {
			t.Fatalf("%q is no sample, in\n%s", line, answer.Metrics)
		}
		values[name] = value
	}
	return values
}

func TestMetricsFollowTheVolumes(t *testing.T) {
	g := guest(t)
	const (
		checks   = `directvol_agent_calls_total{method="Check",code="OK"}`
		stats    = `directvol_agent_calls_total{method="GetVolumeStats",code="OK"}`
		lost     = `directvol_agent_calls_total{method="GetVolumeStats",code="NotFound"}`
		made     = `directvol_agent_call_duration_seconds_count{method="CreateContainer"}`
		took     = `directvol_agent_call_duration_seconds_sum{method="CreateContainer"}`
		volumes  = `directvol_agent_volumes{driver="blk"}`
		abnormal = `directvol_agent_volumes_abnormal`
		errors   = `directvol_agent_volume_conditions{status="DEGRADED",reason="RecordedErrors"}`
	)
	before := metrics(t, g)
	v := mounted(t, g, "ext4")
	for range 10 {
		must(t, g.Agent().Check(limited(t)))
		_, err := v.Stats(limited(t))
		must(t, err)
	}
	_, err := g.Agent().GetVolumeStats(limited(t), "/run/test/nothing")
	refused(t, err, codes.NotFound)
	after := metrics(t, g)
	for name, more := range map[string]float64{checks: 10, stats: 10, lost: 1, made: 1, volumes: 1, abnormal: 0, errors: 0} {
		if got := after[name] - before[name]; got != more {
			t.Errorf("%s grew\nwant by %v\ngot  by %v", name, more, got)
		}
	}
	if after[took] <= before[took] {
		t.Errorf("time in CreateContainer\nwant more than %v s\ngot  %v s", before[took], after[took])
	}
	if resident := after["directvol_agent_resident_memory_bytes"]; after["directvol_agent_anonymous_memory_bytes"] <= 0 || resident < after["directvol_agent_anonymous_memory_bytes"] {
		t.Errorf("memory: %v", after)
	}
}

// A call of an unknown method makes no sample.
func TestMetricsNameNoMethodOfACaller(t *testing.T) {
	g := guest(t)
	before := metrics(t, g)
	_, err := ask[emptypb.Empty](t, g, "Invented", &emptypb.Empty{})
	refused(t, err, codes.Unimplemented)
	for name := range metrics(t, g) {
		if _, ok := before[name]; !ok && !strings.Contains(name, `method="GetMetrics"`) {
			t.Errorf("new: %s", name)
		}
	}
}
