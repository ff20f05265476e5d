package killed

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// locksInode reports whether /proc/locks has a lock on a file (proc(5)). One field is
// major:minor:inode, the first two in hexadecimal.
func locksInode(locks string, file unix.Stat_t) bool {
	name := fmt.Sprintf("%02x:%02x:%d", unix.Major(file.Dev), unix.Minor(file.Dev), file.Ino)
	for line := range strings.Lines(locks) {
		if slices.Contains(strings.Fields(line), name) {
			return true
		}
	}
	return false
}
