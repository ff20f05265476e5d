package rpc

import (
	"context"
	"time"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// quickCheck, and each quick function below, answers a call in the goroutine that has read it,
// where nothing has to be waited for: it is a transport.Quick. All that it does not answer,
// errors among it, the method does.
func quickCheck(r *ttrpcframe.Request) ([]byte, bool) { return serving, len(r.Payload) == 0 }

// serving is Check's answer.
var serving = mustMarshal(&agentpb.HealthCheckResponse{Status: agentpb.HealthCheckResponse_SERVING})

func mustMarshal(m *agentpb.HealthCheckResponse) []byte {
	b, err := m.Marshal()
	if err != nil {
		panic(err) // of a constant, when the program starts
	}
	return b
}

func (a *Agent) quickStats(r *ttrpcframe.Request) ([]byte, bool) {
	var request agentpb.VolumeStatsRequest
	if request.Unmarshal(r.Payload) != nil {
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

// quickResize grows a volume whose disk has grown already. Where it has ended late, the method answers too.
func (a *Agent) quickResize(r *ttrpcframe.Request) ([]byte, bool) {
	var request agentpb.ResizeVolumeRequest
	if r.TimeoutNano != 0 && r.TimeoutNano < int64(leastGrowthTimeout) || request.Unmarshal(r.Payload) != nil {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(context.Background(), quickGrowth)
	defer cancel()
	return nil, a.Volumes.ResizeAtOnce(ctx, request.VolumeGuestPath, request.Size_) && ctx.Err() == nil
}
