package contract

import "strings"

// HostOptions are the options of a Storage that are not passed to the kernel.
var HostOptions = []string{"defaults", "bind", "rbind", "_netdev", "nofail", "auto", "noauto", "user", "nouser", "users", "lazytime", "nomand", "noiversion", "silent", "loud"}

// Reasons that several fields share.
const (
	noProcess = "no process is started yet: StartContainer answers UNIMPLEMENTED"
	noStream  = "no process is started yet, and nothing would ever come out of that port"
)

// fields are all fields, by message. Messages that occur only inside an ignored or refused field
// have no entry.
var fields = []struct {
	message string
	fields  []field
}{
	{"CreateSandboxRequest", []field{
		{"hostname", honoured, "the guest gets the name"},
		{"dns", honoured, "the lines of /etc/resolv.conf, where the agent is PID 1; in a guest with another init the call is refused"},
		{"storages", honoured, "mounted, for as long as the sandbox is there"},
		{"sandbox_pidns", refused, "no process is started yet that could share a PID namespace"},
		{"sandbox_id", ignored, "a guest has one sandbox, whatever its name"},
		{"guest_hook_path", refused, "no hook is run"},
		{"kernel_modules", honoured, "loaded; one that is nowhere in the guest ends the call"},
	}},
	{"KernelModule", []field{
		{"name", honoured, "with `_` or `-`, as modprobe takes it; modules that it needs must be there"},
		{"parameters", honoured, "given to a module that is loaded now; one that is there already must have them, as far as its kernel shows them: a parameter that is not shown is taken for granted"},
	}},
	{"CreateContainerRequest", []field{
		{"container_id", honoured, "whom the storages are held for"},
		{"exec_id", ignored, noProcess},
		{"string_user", ignored, noProcess},
		{"devices", honoured, "waited for as for storages; one that does not come ends the call"},
		{"storages", honoured, "mounted, for as long as the container is there"},
		{"OCI", honoured, "looked at; a container without one is a holder of storages, as is any other so far"},
		{"sandbox_pidns", refused, "no process is started yet that could share a PID namespace"},
		{"shared_mounts", refused, "nothing is mounted from one container into another"},
		{"stdin_port", refused, noStream},
		{"stdout_port", refused, noStream},
		{"stderr_port", refused, noStream},
	}},
	{"RemoveContainerRequest", []field{
		{"container_id", honoured, "of one that there is not, nothing is held: that is success"},
		{"timeout", honoured, "seconds after which the call gives up; 0 means the caller's own deadline, or 8 s where it has none"},
	}},
	{"Device", []field{
		{"id", honoured, "of type blk a PCI path, of type scsi an address: the device is waited for"},
		{"type", honoured, "blk and scsi; another is refused"},
		{"vm_path", honoured, "names the device where there is no id; beside one it is what the host expects the node to be called, and not needed"},
		{"container_path", ignored, noProcess},
		{"options", refused, "no type of device has any"},
	}},
	{"Storage", []field{
		{"driver", honoured, "GetGuestDetails lists those that there are; another is refused"},
		{"driver_options", honoured, "`serial=…` of a disk: the device at the source is waited for until it has that serial; another option is refused"},
		{"source", honoured, "the driver finds it"},
		{"fstype", honoured, "the driver mounts it; another than its own is refused"},
		{"options", honoured, "given to the kernel, of two that undo one another (ro, rw) the last one, and without those that mean something on the host alone or are the default: " + strings.Join(HostOptions, ", ")},
		{"mount_point", honoured, "made where it is missing"},
		{"fs_group", refused, "ownership is not built yet"},
		{"shared", honoured, "held by the sandbox, and outlives the container"},
	}},
	{"Spec", []field{
		{"Version", ignored, noProcess},
		{"Process", ignored, noProcess},
		{"Root", ignored, noProcess},
		{"Hostname", ignored, noProcess},
		{"Mounts", ignored, noProcess},
		{"Hooks", refused, "no hook is run; Kata's runtime runs them on the host and sends none"},
		{"Annotations", ignored, "they are for the runtime"},
		{"Linux", ignored, noProcess},
		{"Solaris", refused, "the guest runs Linux"},
		{"Windows", refused, "the guest runs Linux"},
	}},
}
