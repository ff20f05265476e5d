package agentclient

import (
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
)

// method is one of the agent's calls.
type method struct {
	service, name string
	// repeatable is true if the agent may receive the call twice.
	repeatable bool
}

// The methods that a Client calls. The comments say what happens if a call was carried out, its
// answer was lost, and the call is repeated. They cover every agent that speaks the protocol;
// directvol's own agent accepts each repetition.
var (
	// These calls change nothing.
	checkResizeVolume = method{volumepb.VolumeServiceName, "CheckResizeVolume", true}
	checkReleased     = method{volumepb.VolumeServiceName, "CheckReleased", true}

	check           = method{agentpb.HealthServiceName, "Check", true}
	version         = method{agentpb.HealthServiceName, "Version", true}
	getVolumeHealth = method{volumepb.VolumeServiceName, "GetVolumeHealth", true}
	getVolumeStats  = method{agentpb.AgentServiceName, "GetVolumeStats", true}
	getGuestDetails = method{agentpb.AgentServiceName, "GetGuestDetails", true}
	listVolumes     = method{volumepb.VolumeServiceName, "ListVolumes", true}
	getVolume       = method{volumepb.VolumeServiceName, "GetVolume", true}
	watchVolumes    = method{volumepb.VolumeServiceName, "WatchVolumes", true}
	// ResizeVolume names the size to reach, and never shrinks: a second call finds the work done.
	resizeVolume = method{agentpb.AgentServiceName, "ResizeVolume", true}
	growVolume   = method{volumepb.VolumeServiceName, "GrowVolume", true}

	// Kata's agent counts the request's storages once more, and later unmounts them one time too
	// few.
	createSandbox   = method{agentpb.AgentServiceName, "CreateSandbox", false}
	createContainer = method{agentpb.AgentServiceName, "CreateContainer", false}
	// Kata's agent fails the second call ("Invalid container id", "failed to get sandbox sender
	// channel"). A repetition would hide that the first call succeeded.
	removeContainer = method{agentpb.AgentServiceName, "RemoveContainer", false}
	destroySandbox  = method{agentpb.AgentServiceName, "DestroySandbox", false}
)
