package storage

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/protocols/agentpb"
)

// ephemeral is a tmpfs (Documentation/filesystems/tmpfs.rst): a pod's shared memory, or an emptyDir
// in memory. Its contents are lost when the last holder releases it.
var ephemeral = &driver{
	name: "ephemeral", volume: true,
	check: func(r request) error {
		if r.fstype != "tmpfs" {
			return errkind.New(errkind.InvalidArgument, "unknown fstype %.40q, driver ephemeral has tmpfs", r.fstype)
		}
		if r.source == "" {
			return errkind.New(errkind.InvalidArgument, "an empty source: give the name that mountinfo is to show, such as tmpfs")
		}
		return checkGroupOption(r)
	},
	find: named, mount: mountOrigin, unmount: unmount, there: (*mounted).isMounted, couldGo: couldUnmount,
}

// groupOption is how Kata's runtime writes fs_group among the options of a storage without a disk.
// The kernel does not know this option.
const groupOption = "fsgid="

func checkGroupOption(r request) error {
	if r.options.Has(groupOption) {
		return errkind.New(errkind.Unimplemented, "option %s… is not built yet", groupOption)
	}
	return nil
}

// remountOption is an option that Kata's runtime adds to every update.
const remountOption = "remount"

// Update changes the options, such as the size, of ephemeral storages that are mounted. Options
// that are not named stay, and so do the owner and the mode of the root directory, which a remount
// does not change; mount flags can be set and cleared. Update may be repeated. If one storage
// fails, those before it have been updated. A storage that somebody unmounts later is mounted again
// with the options that it had after its last update. A mount that somebody has made in its place
// with other options is not updated; the error is AlreadyExists. A storage that another mount
// covers is not updated either; the error is FailedPrecondition.
func (t *Table) Update(ctx context.Context, storages []*agentpb.Storage) error {
	requests := make([]request, len(storages))
	for i, s := range storages {
		r, err := parse(s)
		if err != nil {
			return err
		}
		if r.driver != ephemeral {
			return errkind.New(errkind.InvalidArgument, "storage %s: driver %s cannot be updated, %s can", r.mountPoint, r.driver.name, ephemeral.name)
		}
		requests[i] = r
	}
	for _, r := range requests {
		if err := t.inTurn(ctx, "remount", r.mountPoint, func() error { return t.remount(r) }); err != nil {
			return err
		}
	}
	return nil
}

// remount is Update for one storage. The caller has the mount point's turn.
func (t *Table) remount(r request) error {
	m := t.at(r.mountPoint)
	there := false
	if m != nil && m.driver == ephemeral {
		var err error
		if there, err = m.isMounted(); err != nil {
			return err
		}
	}
	top, err := mount.Topmost(r.mountPoint) // with its present options
	if err != nil {
		return err
	}
	if !there || top == nil || !m.is(top) {
		return errkind.New(errkind.NotFound, "storage %s: no %s storage is mounted there", r.mountPoint, ephemeral.name)
	}
	if err := t.adopt(m); err != nil {
		return err
	}
	options := slices.DeleteFunc(strings.Split(r.options.Data, ","), func(o string) bool { return o == remountOption })
	data := strings.Join(options, ",")
	update := mount.Options{Flags: r.options.FlagsAfter(top, r.taken), Data: data}
	updated, err := m.optionsNow().Updated(update)
	if err != nil {
		return errkind.New(errkind.InvalidArgument, "storage %s: %w", r.mountPoint, err)
	}
	said := health.OpenKernelLog()
	defer said.Close()
	err = unix.Mount("", r.mountPoint, "", unix.MS_REMOUNT|update.Flags, data)
	if err != nil {
		return errkind.New(mountKind(err), "remount %s with %q: %w: %s", r.mountPoint, data, err, said.Words(r.fstype))
	}
	t.log.WithField("mountpoint", r.mountPoint).WithField("options", data).Info("storage remounted")
	t.mu.Lock()
	m.updated = updated
	t.mu.Unlock()
	if err := t.save(); err != nil {
		return fmt.Errorf("storage %s is updated, but the next agent would not mount it so: %w", r.mountPoint, err)
	}
	return nil
}

// optionsNow returns the options that a storage is mounted with: those of its last update, or else
// those that it was asked for with. The caller has the mount point's turn.
func (m *mounted) optionsNow() mount.Options {
	if m.updated.Flags != 0 {
		return m.updated
	}
	return m.options
}
