package storage

import (
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/directvol/directvol/agent/contract"
	"github.com/directvol/directvol/agent/refusal"
	"github.com/directvol/directvol/protocols/agentpb"
)

const (
	pathBytes = 4095 // PATH_MAX, less its NUL
	dataBytes = 4095 // mount(2) takes a page of data
)

// request is a Storage that has been found to make sense.
type request struct {
	driver     *driver
	source     string
	fstype     string
	flags      uintptr
	data       string
	mountPoint string
	shared     bool
}

func parse(s *agentpb.Storage) (request, error) {
	refuse := func(format string, args ...any) (request, error) {
		return request{}, refusal.New(refusal.InvalidArgument, "storage %.200q: "+format, append([]any{s.MountPoint}, args...)...)
	}
	if s == nil {
		return request{}, refusal.New(refusal.InvalidArgument, "storage: empty message")
	}
	driver := driverOf(s.Driver)
	if driver == nil {
		return refuse("unknown driver %.40q, this agent has %v", s.Driver, Drivers())
	}
	if len(s.Source) > pathBytes || strings.ContainsRune(s.Source, 0) || !utf8.ValidString(s.Source) {
		return refuse("source %.40q: at most %d bytes of UTF-8, none of them 0", s.Source, pathBytes)
	}
	clean := filepath.Clean(s.MountPoint)
	if !isMountPoint(clean) {
		return refuse("the mount point must be an absolute path below /")
	}
	if err := contract.Check(s); err != nil {
		return request{}, refusal.New(refusal.KindOf(err), "storage %.200q: %w", s.MountPoint, err)
	}
	flags, data := mountOptions(s.Options)
	if len(data) > dataBytes || strings.ContainsRune(data, 0) || !utf8.ValidString(data) {
		return refuse("mount options of %d bytes: at most %d of UTF-8, none of them 0", len(data), dataBytes)
	}
	r := request{driver: driver, source: s.Source, fstype: s.Fstype, flags: flags, data: data, mountPoint: clean, shared: s.Shared}
	if err := driver.check(r); err != nil {
		return request{}, refusal.New(refusal.KindOf(err), "storage %.200q: %w", s.MountPoint, err)
	}
	return r, nil
}

// isMountPoint tells whether a path is clean, absolute and below /. One that is
// no UTF-8 could be written neither into a message nor into the state.
func isMountPoint(path string) bool {
	return utf8.ValidString(path) && filepath.IsAbs(path) && path == filepath.Clean(path) && path != "/" && len(path) <= pathBytes && !strings.ContainsRune(path, 0)
}
