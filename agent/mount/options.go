package mount

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Options are how a filesystem is mounted: mount(2)'s flags, and its data, which are the
// filesystem's own options with commas between them.
type Options struct {
	Flags uintptr
	Data  string
}

// dataBytes is what fits into mount(2)'s page of data.
const dataBytes = 4095

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

// ParseOptions reads options as fstab(5) has them. Some callers write several into one,
// with commas. Those that ignored reports are left out, and empty ones. Of two that undo
// one another the last one counts: taken are the flags that one takes back, for who has
// others to begin with. Data that mount(2) could not take is an error.
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

// Has reports whether the data has an option that begins so.
func (o Options) Has(begins string) bool {
	return slices.ContainsFunc(strings.Split(o.Data, ","), func(option string) bool { return strings.HasPrefix(option, begins) })
}

// With returns the options and more of the data's, which may be "".
func (o Options) With(more string) Options {
	o.Data = strings.Trim(o.Data+","+more, ",")
	return o
}

// timeFlags are about access times. One of them ends the others.
const timeFlags = unix.MS_NOATIME | unix.MS_RELATIME | unix.MS_STRICTATIME

// FlagsAfter are all flags that a mount has after an update with the options, which take
// some back (ParseOptions). The kernel takes away those that a remount does not name. Those
// of now are read from mountinfo: updates, the agent before this one and other programs have
// changed the flags that it was mounted with.
func (o Options) FlagsAfter(top *Info, taken uintptr) uintptr {
	var now uintptr
	for option := range strings.SplitSeq(top.Options+","+top.VFSOptions, ",") {
		now |= flagOf[option]
	}
	if now&timeFlags == 0 {
		now |= unix.MS_STRICTATIME // which mountinfo does not show
	}
	if o.Flags&timeFlags != 0 {
		now &^= timeFlags
	}
	if now = now&^taken | o.Flags; now&timeFlags == 0 {
		now |= unix.MS_RELATIME // the default of a mount; to a remount none means those of before
	}
	return now
}
