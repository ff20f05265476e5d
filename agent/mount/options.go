package mount

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Options are the flags of mount(2) and its data, which are the filesystem's own options separated
// by commas.
type Options struct {
	Flags uintptr
	Data  string
}

// dataBytes is the size of mount(2)'s page of data, without the final NUL.
const dataBytes = 4095

// flagOf maps options to the flags of mount(2); undone maps options to the flag that each clears
// (mount(8)).
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

// ParseOptions parses options as in fstab(5). An element may hold several options, separated by
// commas. Empty options and those for which ignored returns true are left out. Of two options that
// undo one another, the last one counts. taken are the flags that the options clear, for a mount
// that has flags already. Data that mount(2) could not take is an error.
func ParseOptions(options []string, ignored func(string) bool) (o Options, taken uintptr, err error) {
	var data []string
	for option := range strings.SplitSeq(strings.Join(options, ","), ",") {
		if flag, ok := flagOf[option]; ok {
			o.Flags, taken = o.Flags|flag, taken&^flag
		} else if flag, ok := undone[option]; ok {
			o.Flags, taken = o.Flags&^flag, taken|flag
		} else if option != "" && !ignored(option) {
			data = append(data, option)
		}
	}
	o.Data = strings.Join(data, ",")
	if len(o.Data) > dataBytes || strings.ContainsRune(o.Data, 0) || !utf8.ValidString(o.Data) {
		return Options{}, 0, fmt.Errorf("mount options of %d bytes: at most %d of UTF-8, none of them 0", len(o.Data), dataBytes)
	}
	return o, taken, nil
}

// Has reports whether the data has an option with this prefix.
func (o Options) Has(begins string) bool {
	return slices.ContainsFunc(strings.Split(o.Data, ","), func(option string) bool { return strings.HasPrefix(option, begins) })
}

// With returns the options with more appended to the data; more may be "".
func (o Options) With(more string) Options {
	o.Data = strings.Trim(o.Data+","+more, ",")
	return o
}

// timeFlags are the flags for access times, which exclude each other.
const timeFlags = unix.MS_NOATIME | unix.MS_RELATIME | unix.MS_STRICTATIME

// FlagsAfter returns all flags that a mount has after an update with the options, which clear the
// flags in taken (ParseOptions). The kernel clears flags that a remount does not name, so the
// current flags are added. They are read from mountinfo, because updates, an earlier agent and
// other programs may have changed them since the mount.
func (o Options) FlagsAfter(top *Info, taken uintptr) uintptr {
	var now uintptr
	for option := range strings.SplitSeq(top.Options+","+top.VFSOptions, ",") {
		now |= flagOf[option]
	}
	if now&timeFlags == 0 {
		now |= unix.MS_STRICTATIME // mountinfo does not show strictatime
	}
	if o.Flags&timeFlags != 0 {
		now &^= timeFlags
	}
	if now = now&^taken | o.Flags; now&timeFlags == 0 {
		now |= unix.MS_RELATIME // the default of a mount; a remount without a time flag would keep the earlier one
	}
	return now
}

// Updated returns the options of a tmpfs that was made with o after an update with u. u.Flags are
// all flags of the mount (FlagsAfter). An option in u.Data replaces the one with the same name, and
// comes last, because the last of two options counts. A remount ignores the options of the root
// directory (shmem_reconfigure in mm/shmem.c), so Updated does, too. Data that mount(2) could not
// take is an error.
func (o Options) Updated(u Options) (Options, error) {
	update := slices.DeleteFunc(elements(u.Data), func(option string) bool {
		return slices.Contains([]string{"mode", "uid", "gid"}, nameOf(option))
	})
	data := slices.DeleteFunc(elements(o.Data), func(option string) bool {
		return slices.ContainsFunc(update, func(by string) bool { return nameOf(by) == nameOf(option) })
	})
	u.Data = strings.Join(append(data, update...), ",")
	if len(u.Data) > dataBytes {
		return Options{}, fmt.Errorf("mount options of %d bytes with those of earlier updates: at most %d", len(u.Data), dataBytes)
	}
	return u, nil
}

func nameOf(option string) string {
	name, _, _ := strings.Cut(option, "=")
	return name
}

// elements splits data into options. A comma before a digit belongs to an option's value
// (shmem_parse_monolithic in mm/shmem.c).
func elements(data string) (all []string) {
	for option := range strings.SplitSeq(data, ",") {
		switch {
		case option == "":
		case len(all) > 0 && option[0] >= '0' && option[0] <= '9':
			all[len(all)-1] += "," + option
		default:
			all = append(all, option)
		}
	}
	return all
}
