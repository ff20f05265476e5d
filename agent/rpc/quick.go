package rpc

import (
	"context"
	"time"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// quickCheck and each quick function below answer a call in the goroutine that has read it if
// nothing has to be waited for; they are transport.Quick functions. The method answers all other
// calls, including those that fail.
func quickCheck(r *ttrpcframe.Request) ([]byte, bool) { return serving, len(r.Payload) == 0 }

// serving is the answer of Check.
var serving = mustMarshal(&agentpb.HealthCheckResponse{Status: agentpb.HealthCheckResponse_SERVING})

func mustMarshal(m *agentpb.HealthCheckResponse) []byte {
	b, err := m.Marshal()
	if err != nil {
		panic(err) // cannot happen: the message is constant
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

// quickGrowth is how long a growth goes on here before it leaves the next step to the service. Soon
// after that, the transport passes the call to the service anyway: then this growth ends with its
// current step, and the service continues from there. A growth that has ended before is answered
// here.
const quickGrowth = 50 * time.Millisecond

// leastGrowthTimeout is the least time-out of a growth that begins here: quickGrowth is too much of
// a shorter one.
const leastGrowthTimeout = 2 * time.Second

// quickResize grows a volume whose disk has already grown.
func (a *Agent) quickResize(r *ttrpcframe.Request) ([]byte, bool) {
	var request agentpb.ResizeVolumeRequest
	if r.TimeoutNano != 0 && r.TimeoutNano < int64(leastGrowthTimeout) || request.Unmarshal(r.Payload) != nil {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(context.Background(), quickGrowth)
	defer cancel()
	return nil, a.Volumes.ResizeAtOnce(ctx, request.VolumeGuestPath, request.Size_)
}
