package storage

import (
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/mount"
)

// mustAgree refuses to take over a mount whose ro or rw, flags or options differ from those that
// mounting the request would have set, as far as the kernel shows them.
func (r request) mustAgree(top *mount.Info, from origin) error {
	if fstype, ok := filesystem.Lookup(r.fstype); ok {
		r.options = r.options.With(neededOptions(fstype, r, from))
	}
	missing, extra := r.options.Differences(top)
	if len(missing) == 0 && len(extra) == 0 {
		return nil
	}
	return errkind.New(errkind.AlreadyExists, "storage %s: %s is mounted there by somebody else with other options: %v requested but missing, %v present but not requested: unmount it or request the present options",
		r.mountPoint, from.path, missing, extra)
}
