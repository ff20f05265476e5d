package storage

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/contract"
)

// flagOf are the options that mount(2) takes as flags, and undone those that take an
// earlier one back (mount(8)).
var (
	flagOf = map[string]uintptr{
		"ro":          unix.MS_RDONLY,
		"nosuid":      unix.MS_NOSUID,
		"nodev":       unix.MS_NODEV,
		"noexec":      unix.MS_NOEXEC,
		"sync":        unix.MS_SYNCHRONOUS,
		"dirsync":     unix.MS_DIRSYNC,
		"noatime":     unix.MS_NOATIME,
		"nodiratime":  unix.MS_NODIRATIME,
		"relatime":    unix.MS_RELATIME,
		"strictatime": unix.MS_STRICTATIME,
	}
	undone = map[string]uintptr{
		"rw":            unix.MS_RDONLY,
		"suid":          unix.MS_NOSUID,
		"dev":           unix.MS_NODEV,
		"exec":          unix.MS_NOEXEC,
		"async":         unix.MS_SYNCHRONOUS,
		"atime":         unix.MS_NOATIME,
		"diratime":      unix.MS_NODIRATIME,
		"norelatime":    unix.MS_RELATIME,
		"nostrictatime": unix.MS_STRICTATIME,
	}
)

// isHostOnly reports whether CSI drivers pass an option on that means something to
// mount(8), fstab or the kubelet, or is the default, but nothing to a filesystem, which
// would refuse it.
func isHostOnly(option string) bool {
	return option == "" || slices.Contains(contract.HostOptions, option)
}

// mountOptions splits a Storage's options into mount(2)'s flags and data. Some
// callers write several into one, with commas. Of two that undo one another the last
// one counts: taken are the flags that one takes back, for who has others to begin with.
func mountOptions(options []string) (flags, taken uintptr, data string) {
	var rest []string
	for o := range strings.SplitSeq(strings.Join(options, ","), ",") {
		if flag, ok := flagOf[o]; ok {
			flags, taken = flags|flag, taken&^flag
		} else if flag, ok := undone[o]; ok {
			flags, taken = flags&^flag, taken|flag
		} else if !isHostOnly(o) {
			rest = append(rest, o)
		}
	}
	return flags, taken, strings.Join(rest, ",")
}

// hasOption reports whether mount data has an option that begins so.
func hasOption(data, begins string) bool {
	return slices.ContainsFunc(strings.Split(data, ","), func(option string) bool { return strings.HasPrefix(option, begins) })
}

// join adds options to mount data.
func join(data, options string) string {
	return strings.Trim(data+","+options, ",")
}
