package contract

import "strings"

// HostOptions are the options of a Storage that are not passed to the kernel.
var HostOptions = []string{"defaults", "bind", "rbind", "_netdev", "nofail", "auto", "noauto", "user", "nouser", "users", "lazytime", "nomand", "noiversion", "silent", "loud"}

// Reasons that several fields share.
const (
	noProcess = "no process is started yet: StartContainer answers UNIMPLEMENTED"
	noStream  = "no process is started yet, so the port would never carry data"
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
		{"storages", honoured, "mounted while the sandbox exists"},
		{"sandbox_pidns", refused, "no process is started yet that could share a PID namespace"},
		{"sandbox_id", ignored, "a guest has one sandbox, whatever its name"},
		{"guest_hook_path", refused, "no hook is run"},
		{"kernel_modules", honoured, "loaded; a module that the guest does not have ends the call"},
	}},
	{"KernelModule", []field{
		{"name", honoured, "with `_` or `-`, as for modprobe; the modules that it depends on must be in the guest"},
		{"parameters", honoured, "given to a module when it is loaded; a module that is loaded already must have the same values. A parameter that the kernel does not show is not compared"},
	}},
	{"CreateContainerRequest", []field{
		{"container_id", honoured, "the holder of the storages"},
		{"exec_id", ignored, noProcess},
		{"string_user", ignored, noProcess},
		{"devices", honoured, "waited for, as for storages; a device that does not appear ends the call"},
		{"storages", honoured, "mounted while the container exists"},
		{"OCI", honoured, "checked; a container without it is accepted, because every container only holds storages so far"},
		{"sandbox_pidns", refused, "no process is started yet that could share a PID namespace"},
		{"shared_mounts", refused, "nothing is mounted from one container into another"},
		{"stdin_port", refused, noStream},
		{"stdout_port", refused, noStream},
		{"stderr_port", refused, noStream},
	}},
	{"RemoveContainerRequest", []field{
		{"container_id", honoured, "an unknown container holds nothing: the call succeeds"},
		{"timeout", honoured, "seconds after which the call gives up; 0 means the caller's own deadline, or 8 s without one"},
	}},
	{"Device", []field{
		{"id", honoured, "a PCI path for type blk, a SCSI address for type scsi: the device is waited for"},
		{"type", honoured, "blk and scsi; another type is refused"},
		{"vm_path", honoured, "names the device if there is no id; otherwise it is the device node's name that the host expects, and is not used, but /dev/disk/by-id/virtio-SERIAL promises the disk's serial"},
		{"container_path", ignored, noProcess},
		{"options", refused, "no device type has options"},
	}},
	{"Storage", []field{
		{"driver", honoured, "GetGuestDetails lists the drivers; another driver is refused"},
		{"driver_options", honoured, "`serial=…` of a disk: the call waits until the device at the source has that serial; another option is refused"},
		{"source", honoured, "the driver finds it"},
		{"fstype", honoured, "the driver mounts it; a filesystem that the driver does not have is refused"},
		{"options", honoured, "given to the kernel; of two contrary options (ro, rw) the last one counts; options that concern only the host, or are the default, are dropped: " + strings.Join(HostOptions, ", ")},
		{"mount_point", honoured, "created if it is missing"},
		{"fs_group", refused, "ownership is not built yet"},
		{"shared", honoured, "the sandbox holds it, so it outlives the container"},
	}},
	{"Spec", []field{
		{"Version", ignored, noProcess},
		{"Process", ignored, noProcess},
		{"Root", ignored, noProcess},
		{"Hostname", ignored, noProcess},
		{"Mounts", ignored, noProcess},
		{"Hooks", refused, "no hook is run; Kata's runtime runs hooks on the host and sends none"},
		{"Annotations", ignored, "they are for the runtime"},
		{"Linux", ignored, noProcess},
		{"Solaris", refused, "the guest runs Linux"},
		{"Windows", refused, "the guest runs Linux"},
	}},
}
