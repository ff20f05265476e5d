package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/directvol/directvol/protocols/program"
)

func newExamplesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "examples [METHOD …]",
		Short: "Show an example call of each method",
		Long: `examples prints the arguments of agent-ctl connect --server-address URI for each method, or for the
named methods. Replace the paths, names and ids in them. A method marked as not in directvol's agent
is a method of Kata's agent.`,
		Example: `  agent-ctl examples
  agent-ctl examples GetVolumeStats ResizeVolume`,
		ValidArgsFunction: completeMethods,
		RunE: func(cmd *cobra.Command, names []string) error {
			methods, err := methodsNamed(names)
			if err != nil {
				return program.Usage(err)
			}
			for _, m := range methods {
				e := examples[m.Method]
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "# %s\n-c '%s'\n", about(m.Method), e.command(m.Method)); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// example is a short description of a method, and a request for the method. A request contains no
// single quote, so a shell accepts it between two.
type example struct{ does, request string }

// command returns the argument of -c.
func (e example) command(method string) string {
	return strings.TrimSpace(method + " " + e.request)
}

// ours are the methods that directvol's agent implements. The other methods exist only in Kata's
// agent.
var ours = map[string]bool{
	"Check": true, "Version": true,
	"CreateSandbox": true, "DestroySandbox": true, "CreateContainer": true, "RemoveContainer": true, "UpdateEphemeralMounts": true,
	"GetVolumeStats": true, "ResizeVolume": true, "GetGuestDetails": true, "GetMetrics": true,
	"CheckResizeVolume": true, "GetVolumeHealth": true, "CheckReleased": true,
	"ListVolumes": true, "GetVolume": true, "WatchVolumes": true, "GrowVolume": true,
	"FreezeVolumes": true, "ThawVolumes": true, "SyncVolume": true, "TrimVolume": true,
}

// about returns the description of a method, with a note if directvol's agent lacks the method.
func about(method string) string {
	if ours[method] {
		return examples[method].does
	}
	return examples[method].does + " [not in directvol's agent]"
}

// examples has one example for each method.
var examples = map[string]example{
	"Check":   {"whether the agent is ready", ``},
	"Version": {"the versions of the wire and of the agent", ``},

	"CreateSandbox":   {"make the guest ready for containers", `json://{"sandbox_id":"sb1","hostname":"sb1"}`},
	"DestroySandbox":  {"end all containers and unmount everything", ``},
	"GetGuestDetails": {"the features of the guest and the agent", `json://{"mem_block_size":true,"mem_hotplug_probe":true}`},
	"GetMetrics":      {"the agent's metrics, in Prometheus' text format", ``},
	"GetDiagnosticData": {"a container's diagnostic log",
		`json://{"log_type":"termination_log","container_id":"c1"}`},
	"GetOOMEvent": {"wait for a container that ran out of memory (--timeout 0)", ``},
	"SetPolicy":   {"replace the policy on calls, in Rego", `json://{"policy":"package agent_policy\n\ndefault AllowRequestsFailingPolicy := true\n"}`},

	"GetVolumeStats": {"usage and condition of a volume",
		`json://{"volume_guest_path":"/run/kata-containers/sandbox/storage/MDIvMDE="}`},
	"GetVolumeHealth": {"all conditions of a volume",
		`json://{"volume_guest_path":"/run/kata-containers/sandbox/storage/MDIvMDE="}`},
	"ResizeVolume": {"grow a volume's filesystem to a size in bytes that its disk has",
		`json://{"volume_guest_path":"/run/kata-containers/sandbox/storage/MDIvMDE=","size":2147483648}`},
	"CheckResizeVolume": {"check whether a volume's filesystem can grow to a size, before its disk grows",
		`json://{"volume_guest_path":"/run/kata-containers/sandbox/storage/MDIvMDE=","size":2147483648}`},
	"CheckReleased": {"check that nothing in the guest uses a device any more, before its disk is detached",
		`json://{"driver":"blk","source":"02/01"}`},
	"ListVolumes": {"all mounted volumes", ``},
	"GetVolume": {"all that is known of a volume",
		`json://{"volume_guest_path":"/run/kata-containers/sandbox/storage/MDIvMDE="}`},
	"WatchVolumes": {"all volumes, and then each change, until Ctrl-C (--timeout 0)", ``},
	"GrowVolume": {"grow a volume's filesystem, and show each step",
		`json://{"volume_guest_path":"/run/kata-containers/sandbox/storage/MDIvMDE=","size":2147483648}`},
	"FreezeVolumes": {"freeze volumes until ThawVolumes, Ctrl-C, --timeout or the lease's end",
		`json://{"volume_guest_paths":["/run/kata-containers/sandbox/storage/MDIvMDE="],"lease_milliseconds":30000}`},
	"ThawVolumes": {"thaw the volumes of a lease", `json://{"lease":"1"}`},
	"SyncVolume": {"write all that is cached of a volume to its disk",
		`json://{"volume_guest_path":"/run/kata-containers/sandbox/storage/MDIvMDE="}`},
	"TrimVolume": {"tell the disk which blocks of a volume are free",
		`json://{"volume_guest_path":"/run/kata-containers/sandbox/storage/MDIvMDE="}`},
	"UpdateEphemeralMounts": {"remount an ephemeral storage with other options",
		`json://{"storages":[{"driver":"ephemeral","source":"shm","fstype":"tmpfs","options":["size=67108864"],"mount_point":"/run/kata-containers/sandbox/shm"}]}`},
	"RemoveStaleVirtiofsShareMounts": {"unmount the storages that virtio-fs no longer shares", ``},

	"CreateContainer": {"mount a container's storages and create it",
		`json://{"container_id":"c1","storages":[{"driver":"blk","source":"02/01","fstype":"ext4","options":["noatime"],` +
			`"mount_point":"/run/kata-containers/sandbox/storage/MDIvMDE="}],` +
			`"OCI":{"Version":"1.2.0","Root":{"Path":"/run/kata-containers/c1/rootfs"},"Process":{"Args":["/bin/sleep","60"],"Cwd":"/","Capabilities":{"Bounding":["CAP_KILL"],"Effective":["CAP_KILL"],"Permitted":["CAP_KILL"]}},` +
			`"Mounts":[{"destination":"/data","source":"/run/kata-containers/sandbox/storage/MDIvMDE=","type":"bind","options":["rbind"]}],` +
			`"Annotations":{"io.kubernetes.cri.container-name":"c1"},"Linux":{"CgroupsPath":"/c1","Namespaces":[{"Type":"mount"},{"Type":"pid"}]}}}`},
	"StartContainer":  {"start a container's first process", `json://{"container_id":"c1"}`},
	"RemoveContainer": {"end a container within a number of seconds, and unmount the storages that only it used", `json://{"container_id":"c1","timeout":10}`},
	"UpdateContainer": {"change a container's resources",
		`json://{"container_id":"c1","resources":{"Memory":{"Limit":268435456},"CPU":{"Quota":50000,"Period":100000}}}`},
	"StatsContainer":  {"a container's cgroup and network usage", `json://{"container_id":"c1"}`},
	"PauseContainer":  {"stop all processes of a container", `json://{"container_id":"c1"}`},
	"ResumeContainer": {"resume all processes of a container", `json://{"container_id":"c1"}`},

	"ExecProcess": {"start one more process in a container",
		`json://{"container_id":"c1","exec_id":"e1","process":{"Args":["/bin/ls","/data"],"Env":["PATH=/bin"],"Cwd":"/"}}`},
	"SignalProcess": {"send a signal, by its number", `json://{"container_id":"c1","exec_id":"e1","signal":15}`},
	"WaitProcess":   {"wait for the end of a process (--timeout 0)", `json://{"container_id":"c1","exec_id":"e1"}`},
	"WriteStdin":    {"write to a process's standard input, in base64", `json://{"container_id":"c1","exec_id":"e1","data":"aGVsbG8K"}`},
	"CloseStdin":    {"close a process's standard input", `json://{"container_id":"c1","exec_id":"e1"}`},
	"ReadStdout":    {"read a process's standard output", `json://{"container_id":"c1","exec_id":"e1","len":4096}`},
	"ReadStderr":    {"read a process's standard error", `json://{"container_id":"c1","exec_id":"e1","len":4096}`},
	"TtyWinResize":  {"set the size of a process's terminal", `json://{"container_id":"c1","exec_id":"e1","row":24,"column":80}`},

	"UpdateInterface": {"set up a network interface",
		`json://{"interface":{"device":"eth0","name":"eth0","IPAddresses":[{"family":"v4","address":"192.0.2.2","mask":"24"}],"mtu":1500,"hwAddr":"02:00:00:00:00:01"}}`},
	"UpdateRoutes": {"replace the routes",
		`json://{"routes":{"Routes":[{"dest":"","gateway":"192.0.2.1","device":"eth0","family":"v4"}]}}`},
	"ListInterfaces": {"the network interfaces", ``},
	"ListRoutes":     {"the routes", ``},
	"AddARPNeighbors": {"add entries to the neighbour table",
		`json://{"neighbors":{"ARPNeighbors":[{"toIPAddress":{"family":"v4","address":"192.0.2.1"},"device":"eth0","lladdr":"02:00:00:00:00:02","state":128}]}}`},
	"GetIPTables": {"the rules of iptables-save", `json://{"is_ipv6":true}`},
	"SetIPTables": {"rules for iptables-restore, in base64", `json://{"is_ipv6":false,"data":"KmZpbHRlcgpDT01NSVQK"}`},

	"OnlineCPUMem":      {"bring hot-plugged processors and memory online", `json://{"nb_cpus":1,"cpu_only":true}`},
	"MemHotplugByProbe": {"probe hot-plugged memory at physical addresses", `json://{"memHotplugProbeAddr":[4294967296]}`},
	"MemAgentMemcgSet":  {"set how the memory agent swaps cgroups out", `json://{"disabled":false,"swap":true,"swappiness_max":50,"period_secs":600}`},
	"MemAgentCompactSet": {"set how the memory agent compacts memory",
		`json://{"disabled":false,"period_secs":600,"compact_order":9,"compact_force_times":3}`},
	"AddSwap":          {"swap to a disk, by its PCI path", `json://{"PCIPath":[2,1]}`},
	"AddSwapPath":      {"swap to a disk, by its device file", `json://{"path":"/dev/vdb"}`},
	"ReseedRandomDev":  {"feed the random device, in base64", `json://{"data":"c29tZSBlbnRyb3B5IGZyb20gdGhlIGhvc3Q="}`},
	"SetGuestDateTime": {"set the clock, since the Unix epoch", `json://{"Sec":1767225600,"Usec":0}`},
	"CopyFile": {"write a file below the containers' shared folder",
		`json://{"path":"/run/kata-containers/shared/containers/c1-hello","file_size":6,"file_mode":33188,"dir_mode":493,"data":"aGVsbG8K"}`},
}
