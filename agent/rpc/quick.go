package rpc

import (
	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/frame"
)

// Quick answers Check and GetVolumeStats where nothing has to be waited for, in
// the goroutine that reads the connection: it is a transport.Quick. What it does
// not answer, errors and panics among it, the services do.
func (a *Agent) Quick(r *frame.Request) (response []byte, ok bool) {
	var name string
	defer func() {
		if p := recover(); p != nil {
			a.panicked(name, p)
			response, ok = nil, false
		}
	}()
	switch {
	case string(r.Method) == "Check" && string(r.Service) == agentpb.HealthServiceName:
		name = "Check"
		response, ok = serving, len(r.Payload) == 0
	case string(r.Method) == "GetVolumeStats" && string(r.Service) == agentpb.AgentServiceName:
		name = "GetVolumeStats"
		response, ok = a.quickStats(r.Payload)
	}
	if ok {
		a.counts.Of(name).Count(codes.OK)
	}
	return response, ok
}

// serving is Check's answer.
var serving = mustMarshal(&agentpb.HealthCheckResponse{Status: agentpb.HealthCheckResponse_SERVING})

func mustMarshal(m *agentpb.HealthCheckResponse) []byte {
	b, err := m.Marshal()
	if err != nil {
		panic(err) // of a constant, when the program starts
	}
	return b
}

func (a *Agent) quickStats(payload []byte) ([]byte, bool) {
	var request agentpb.VolumeStatsRequest
	if request.Unmarshal(payload) != nil {
		return nil, false
	}
	stats, ok := a.Volumes.StatsAtOnce(request.VolumeGuestPath)
	if !ok {
		return nil, false
	}
	abnormal, message := health.Summary(stats.Conditions)
	response, err := statsResponse(&stats, abnormal, message).Marshal()
	return response, err == nil
}
