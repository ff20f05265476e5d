package rpc

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/frame"
)

// Quick answers Check and GetVolumeStats where nothing has to be waited for, and
// ResizeVolume where nothing but a short growth has, in the goroutine that reads the
// connection: it is a transport.Quick. All that it does not answer, errors and panics
// among it, the services do.
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
	case string(r.Method) == "ResizeVolume" && string(r.Service) == agentpb.AgentServiceName:
		name = "ResizeVolume"
		return nil, a.quickResize(r) // which counts itself, with its time
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

// quickGrowth is how long a growth goes on here before it leaves its next step to the
// service. The transport gives the call to the service after about as long: then this one
// ends with the step that it is at, and the service's goes on from there.
const quickGrowth = 50 * time.Millisecond

// leastGrowthTimeout is the least time-out of a growth that begins here: of a shorter one
// quickGrowth is too much.
const leastGrowthTimeout = 2 * time.Second

// quickResize grows a volume whose disk has grown already.
func (a *Agent) quickResize(r *frame.Request) bool {
	var request agentpb.ResizeVolumeRequest
	if r.TimeoutNano != 0 && r.TimeoutNano < int64(leastGrowthTimeout) || request.Unmarshal(r.Payload) != nil || !a.isReady() {
		return false
	}
	if !a.calls.TryRLock() { // the agent is ending
		return false
	}
	defer a.calls.RUnlock()
	began := time.Now()
	ctx, cancel := context.WithDeadline(context.Background(), began.Add(quickGrowth))
	defer cancel()
	if !a.Volumes.ResizeAtOnce(ctx, request.VolumeGuestPath, request.Size_) || ctx.Err() != nil {
		return false // also where it has ended late: the service answers, and counts
	}
	a.counts.Of("ResizeVolume").Observe(codes.OK, time.Since(began))
	a.Log.Debug("ResizeVolume")
	return true
}
