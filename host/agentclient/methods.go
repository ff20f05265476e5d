package agentclient

import (
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
)

// method is a call of the agent.
type method struct {
	service, name string
	// repeatable says that the call may reach the agent twice.
	repeatable bool
}

// The methods that a Client calls, and what it would do to make one again that was carried out and whose answer was lost. It is judged by what any
// agent may do that speaks the protocol; directvol's own takes each of them again.
var (
	// These change nothing.
	checkResizeVolume = method{volumepb.VolumeServiceName, "CheckResizeVolume", true}
	checkReleased     = method{volumepb.VolumeServiceName, "CheckReleased", true}

	check           = method{agentpb.HealthServiceName, "Check", true}
	version         = method{agentpb.HealthServiceName, "Version", true}
	getVolumeHealth = method{volumepb.VolumeServiceName, "GetVolumeHealth", true}
	getVolumeStats  = method{agentpb.AgentServiceName, "GetVolumeStats", true}
	getGuestDetails = method{agentpb.AgentServiceName, "GetGuestDetails", true}
	// It names the size to reach, and nothing shrinks: the second one finds the work done.
	resizeVolume = method{agentpb.AgentServiceName, "ResizeVolume", true}

	// Kata's agent counts the request's storages once more, and unmounts them one time too few later.
	createSandbox   = method{agentpb.AgentServiceName, "CreateSandbox", false}
	createContainer = method{agentpb.AgentServiceName, "CreateContainer", false}
	// Kata's agent fails the second one ("Invalid container id", "failed to get sandbox sender channel"), which would hide that the first has worked.
	removeContainer = method{agentpb.AgentServiceName, "RemoveContainer", false}
	destroySandbox  = method{agentpb.AgentServiceName, "DestroySandbox", false}
)
