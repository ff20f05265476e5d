package mount

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
)

// Differences compares the options with those that the kernel shows for a mount. missing are
// options that the mount does not show; extra are options that it shows and o does not contain.
// Both are empty if it was mounted with these options.
func (o Options) Differences(top *Info) (missing, extra []string) {
	wantMount, wantSuper := o.flagNames()
	compare := func(want, shown, mayShow []string) {
		for _, option := range want {
			if !slices.Contains(shown, option) {
				missing = append(missing, option)
			}
		}
		for _, option := range shown {
			key, _, _ := strings.Cut(option, "=")
			if !slices.Contains(want, option) && !slices.Contains(mayShow, option) && !slices.Contains(mayShow, key+"=") {
				extra = append(extra, option)
			}
		}
	}
	compare(wantMount, strings.Split(top.Options, ","), nil)
	for option := range strings.SplitSeq(o.Data, ",") {
		if option = canonical(option); option != "" && !isShare(option) {
			wantSuper = append(wantSuper, option)
		}
	}
	var shown []string
	for option := range strings.SplitSeq(top.VFSOptions, ",") {
		shown = append(shown, canonical(option))
	}
	all := slices.Concat(shown, silent[top.FSType], ext4Options(top))
	wantSuper = slices.DeleteFunc(wantSuper, func(option string) bool { return !slices.Contains(shown, option) && slices.Contains(all, option) })
	mayShow := shownAnyway[top.FSType]
	if slices.Contains(wantSuper, "data=journal") {
		mayShow = append(slices.Clone(mayShow), "nodelalloc", "nodioread_nolock") // ext4 turns these off for data=journal
	}
	if slices.ContainsFunc(strings.Split(o.Data, ","), isShare) {
		mayShow = append(slices.Clone(mayShow), "size=")
	}
	compare(wantSuper, shown, mayShow)
	return missing, extra
}

// flagNames returns the flags as mountinfo shows them: those of the mount, and those of the
// superblock (show_mnt_opts and show_sb_opts in fs/proc_namespace.c).
func (o Options) flagNames() (ofMount, ofSuper []string) {
	ofMount, ofSuper = []string{"rw"}, []string{"rw"}
	if o.Flags&unix.MS_RDONLY != 0 {
		ofMount[0], ofSuper[0] = "ro", "ro"
	}
	for flag, name := range map[uintptr]string{unix.MS_NOSUID: "nosuid", unix.MS_NODEV: "nodev", unix.MS_NOEXEC: "noexec", unix.MS_NOATIME: "noatime", unix.MS_NODIRATIME: "nodiratime"} {
		if o.Flags&flag != 0 {
			ofMount = append(ofMount, name)
		}
	}
	if o.Flags&(unix.MS_NOATIME|unix.MS_STRICTATIME) == 0 {
		ofMount = append(ofMount, "relatime")
	}
	for flag, name := range map[uintptr]string{unix.MS_SYNCHRONOUS: "sync", unix.MS_DIRSYNC: "dirsync"} {
		if o.Flags&flag != 0 {
			ofSuper = append(ofSuper, name)
		}
	}
	return ofMount, ofSuper
}

// shownAnyway are options that filesystems show on their own, whatever options they were mounted
// with.
var shownAnyway = map[string][]string{
	"ext4":     {"seclabel", "stripe=", "mb_optimize_scan="},
	"ext3":     {"seclabel", "stripe=", "mb_optimize_scan="},
	"xfs":      {"seclabel", "attr2", "inode64", "logbufs=", "logbsize=", "noquota", "sunit=", "swidth="},
	"btrfs":    {"seclabel", "ssd", "discard=async", "space_cache", "space_cache=v2", "subvolid=5", "subvol=/"},
	"tmpfs":    {"seclabel", "inode32", "inode64"},
	"virtiofs": {"seclabel"},
}

// silent are options that filesystems have by default and do not show.
var silent = map[string][]string{
	"tmpfs": {"mode=1777", "uid=0", "gid=0"},
}

// ext4Options returns all options of an ext4 or ext3, including its defaults. mountinfo shows only
// those that differ from the defaults (Documentation/filesystems/ext4).
func ext4Options(top *Info) []string {
	identity := Filesystem(top)
	if sysfsName(top.FSType) != "ext4" || len(identity.Devices) == 0 {
		return nil
	}
	name, err := blockdev.NameOf("/", identity.Devices[0].Number)
	if err != nil {
		return nil
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/fs/ext4/%s/options", name))
	if err != nil {
		return nil
	}
	return strings.Fields(string(text))
}

// isShare reports whether an option is a percentage of the guest's memory. The kernel shows bytes,
// so such an option cannot be compared.
func isShare(option string) bool {
	return strings.HasPrefix(option, "size=") && strings.HasSuffix(option, "%")
}

// canonical returns an option in a form in which equal options are equal strings.
func canonical(option string) string {
	key, value, _ := strings.Cut(option, "=")
	switch key {
	case "mode":
		if mode, err := strconv.ParseUint(value, 8, 32); err == nil {
			return fmt.Sprintf("mode=%o", mode)
		}
	case "compress", "compress-force":
		if value == "zlib" || value == "zstd" {
			return option + ":3" // the default level
		}
	case "size", "nr_inodes", "nr_blocks", "logbsize":
		if n, ok := amount(value); ok {
			return fmt.Sprintf("%s=%d", key, n)
		}
	}
	return option
}

// amount parses a number with an optional suffix k, m or g, as the kernel does (memparse in
// lib/cmdline.c).
func amount(text string) (n uint64, ok bool) {
	digits := strings.TrimRight(text, "kKmMgG")
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || len(text)-len(digits) > 1 {
		return 0, false
	}
	shift := map[string]uint{"": 0, "k": 10, "m": 20, "g": 30}[strings.ToLower(text[len(digits):])]
	return n << shift, n<<shift>>shift == n
}
