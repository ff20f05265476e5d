package storage

import (
	"context"
	"os"
	"time"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
)

// wants returns the identity that a mount of an origin has for a request: the whole filesystem, on
// exactly this disk.
func (r request) wants(from origin) mount.Identity {
	want := mount.Identity{FSType: r.fstype, Root: "/"}
	if from.device.Number != 0 {
		want.Devices = []mount.Device{from.device}
	} else {
		want.Source = from.path
	}
	return want
}

// origin returns where the storage is mounted from.
func (m *mounted) origin() origin {
	m.which.Lock()
	defer m.which.Unlock()
	return m.from
}

// mount returns the identity of the storage's mount; it is zero before there is one.
func (m *mounted) mount() mount.Identity {
	m.which.Lock()
	defer m.which.Unlock()
	return m.identity
}

// set changes the origin and the identity. The caller has the mount point's turn.
func (m *mounted) set(from origin, identity mount.Identity) {
	m.which.Lock()
	defer m.which.Unlock()
	m.from, m.identity = from, identity
}

// isOf reports whether a mount is one that the request would make of an origin.
func (r request) isOf(from origin, at *mount.Info) bool {
	return r.wants(from).Same(mount.Filesystem(at))
}

// is reports whether a mount is the storage's: the mount that was made, or a later mount of the
// same filesystem by somebody else.
func (m *mounted) is(at *mount.Info) bool {
	was := m.mount()
	if !m.isOf(m.origin(), at) {
		return false
	}
	if !was.IsMount() || was.UUID == "" || mount.Identify(at).Same(was) {
		return true
	}
	uuid := m.uuid()
	return uuid == "" || uuid == was.UUID
}

// adopt notes which mount belongs to the storage. The caller has the mount point's turn. adopt
// reads the UUID from the disk, which has just been mounted, and waits for that no longer than
// uuidLimit. A mount by somebody else in the place of the storage's own must have the storage's
// present options; otherwise the error is AlreadyExists.
func (t *Table) adopt(m *mounted) error {
	if !m.driver.volume {
		return nil
	}
	read := mountsAt
	if m.mount().IsMount() {
		read = mount.At // with its present options
	}
	mounts, err := read(m.mountPoint)
	if err != nil {
		return err
	}
	for _, at := range mounts {
		if !m.is(at) {
			continue
		}
		now, was := mount.Identify(at), m.mount()
		if was.IsMount() && now.Same(was) {
			return nil
		}
		if err := m.mustBeAsItWas(at, was); err != nil {
			return err
		}
		now.UUID = m.uuid()
		m.set(m.origin(), now)
		return nil
	}
	return errkind.New(errkind.FailedPrecondition, "storage %s: somebody in the guest has unmounted it meanwhile: call again", m.mountPoint)
}

// mustBeAsItWas refuses a mount that has not the options of the storage's own mount, which was one
// with the identity was; was is zero if there was none.
func (m *mounted) mustBeAsItWas(at *mount.Info, was mount.Identity) error {
	if !was.IsMount() {
		return nil
	}
	r := m.request
	r.options = m.optionsNow()
	return r.mustAgree(at, m.origin())
}

// own makes the volume table watch the mount of a storage, which was just adopted, as owned.
// Somebody may have covered it since.
func (t *Table) own(m *mounted) error {
	return t.volumes.Own(m.mountPoint, m.mount(), health.Past{})
}

// follow gives a storage the disk that its source leads to now, if the storage's earlier disk and
// its mount are gone. The caller has the mount point's turn.
func (t *Table) follow(m *mounted, r request, from origin) error {
	if m.origin().same(from) || r.source != m.source || isDevice(m.origin()) {
		return nil
	}
	if there, err := m.driver.there(m); there || err != nil {
		return err
	}
	was := m.mount()
	was.UUID = "" // of the earlier disk; somebody's mount of the new one is compared (mustBeAsItWas)
	m.set(from, was)
	t.log.WithField("mountpoint", m.mountPoint).WithField("device", from.path).Warn("storage lost its disk and is mounted from the disk that replaced it")
	return nil
}

// uuidLimit bounds the wait for reading a UUID from a disk. Without the UUID, a mount is identified
// by its other properties.
const uuidLimit = time.Second

// uuid returns the UUID of the filesystem on the storage's disk, or "" if it cannot be read in
// time.
func (m *mounted) uuid() string {
	ctx, cancel := context.WithTimeout(context.Background(), uuidLimit)
	defer cancel()
	from := m.origin()
	uuid, _ := m.uuids.Ask(ctx, from, func() string { return readUUID(from.path, m.fstype) })
	return uuid
}

func readUUID(path, fstype string) string {
	of, ok := filesystem.Lookup(fstype)
	if !ok {
		return ""
	}
	disk, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer disk.Close()
	uuid, err := of.UUID(disk)
	if err != nil {
		return ""
	}
	return uuid
}
