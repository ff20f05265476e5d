// Package guest applies the settings of a sandbox that concern the whole guest: its hostname, its
// resolver configuration (resolv.conf(5)) and kernel modules. Each call may be repeated.
// SetHostname and SetResolver return a function that undoes the change.
package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/guestinit"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/protocols/agentpb"
)

const (
	// hostnameBytes is the longest hostname that the kernel accepts (uname(2)).
	hostnameBytes = 64
	// resolverBytes bounds /etc/resolv.conf, whose readers expect a few lines.
	resolverBytes = 64 << 10
	// moduleBytes is the longest name of a module (MODULE_NAME_LEN).
	moduleBytes = 56
)

// Guest is the guest that this process runs in.
type Guest struct {
	root string
	init bool
	load func(path, parameters string) error
	ours *modules
}

// modules records the modules that this process has loaded, with the parameters that it gave them,
// because the kernel does not show every parameter, and shows some in another form.
type modules struct {
	mu    sync.Mutex
	given map[string][]string
}

// New returns the guest. init is set if this process is PID 1. In a guest with another init, some
// settings belong to that init.
func New(init bool) Guest { return newGuest("/", init, guestinit.LoadModule) }

func newGuest(root string, init bool, load func(path, parameters string) error) Guest {
	return Guest{root, init, load, &modules{given: map[string][]string{}}}
}

// SetHostname sets the guest's hostname. An empty name changes nothing.
func (Guest) SetHostname(name string) (undo func() error, err error) {
	if name == "" {
		return nil, nil
	}
	if len(name) > hostnameBytes || strings.ContainsRune(name, 0) {
		return nil, errkind.New(errkind.InvalidArgument, "hostname %.80q: at most %d bytes, none of them 0", name, hostnameBytes)
	}
	before, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	return func() error { return setHostname(before) }, setHostname(name)
}

func setHostname(name string) error {
	return os.NewSyscallError("sethostname", unix.Sethostname([]byte(name)))
}

// SetResolver writes the lines of /etc/resolv.conf. Without lines it changes nothing.
func (g Guest) SetResolver(lines []string) (undo func() error, err error) {
	if len(lines) == 0 {
		return nil, nil
	}
	if !g.init {
		return nil, errkind.New(errkind.Unimplemented, "dns: /etc/resolv.conf belongs to this guest's own init, and this agent is not it")
	}
	text := strings.Join(lines, "\n") + "\n"
	if len(text) > resolverBytes || strings.ContainsRune(text, 0) || !utf8.ValidString(text) || strings.Count(text, "\n") != len(lines) {
		return nil, errkind.New(errkind.InvalidArgument, "dns: %d bytes: want lines of UTF-8, at most %d bytes in all", len(text), resolverBytes)
	}
	path := filepath.Join(g.root, "etc/resolv.conf")
	before, err := os.ReadFile(path)
	missing := errors.Is(err, fs.ErrNotExist)
	if err != nil && !missing {
		return nil, err
	}
	undo = func() error {
		if missing {
			return os.Remove(path)
		}
		return replace(path, before)
	}
	return undo, replace(path, []byte(text))
}

// replace writes a file completely or not at all.
func replace(path string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// LoadModules loads the modules that are not loaded yet. They are never unloaded.
func (g Guest) LoadModules(modules []*agentpb.KernelModule) error {
	for _, m := range modules {
		if m == nil {
			return errkind.New(errkind.InvalidArgument, "kernel_modules: empty message")
		}
		if len(m.Name) > moduleBytes || m.Name == "" || strings.ContainsFunc(m.Name, func(r rune) bool { return !strings.ContainsRune(moduleRunes, r) }) {
			return errkind.New(errkind.InvalidArgument, "kernel_modules: %.80q is not a module name", m.Name)
		}
		if err := g.loadOne(strings.ReplaceAll(m.Name, "-", "_"), m.Parameters); err != nil {
			return errkind.New(errkind.Of(err), "kernel module %s: %w", m.Name, err)
		}
	}
	return nil
}

const moduleRunes = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"

func (g Guest) loadOne(name string, parameters []string) error {
	g.ours.mu.Lock() // otherwise two calls could both load it
	defer g.ours.mu.Unlock()
	folder := filepath.Join(g.root, "sys/module", name)
	if _, err := os.Stat(folder); err == nil {
		given, ours := g.ours.given[name]
		return hasParameters(folder, parameters, given, ours)
	}
	path, err := g.find(name)
	if err != nil || path == builtIn && len(parameters) == 0 {
		return err
	}
	if path == builtIn {
		return errkind.New(errkind.FailedPrecondition, "it is built into the kernel, which takes %q only on its command line", parameters)
	}
	log := health.OpenKernelLog()
	defer log.Close()
	if err := g.load(path, strings.Join(parameters, " ")); err != nil {
		return errkind.New(errkind.FailedPrecondition, "%w: %s", err, log.Words(name))
	}
	g.ours.given[name] = slices.Clone(parameters)
	return nil
}

// builtIn is the path that find returns for a module that is part of the kernel.
const builtIn = "built in"

// errFound stops a walk.
var errFound = errors.New("found")

// find returns the file of a module, given by its name with "_" for "-".
func (g Guest) find(name string) (path string, err error) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return "", os.NewSyscallError("uname", err)
	}
	dir := filepath.Join(g.root, "lib/modules", unix.ByteSliceToString(uts.Release[:]))
	isIt := func(file string) bool {
		base, _, isModule := strings.Cut(filepath.Base(file), ".ko")
		return isModule && strings.ReplaceAll(base, "-", "_") == name
	}
	list, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	for line := range strings.Lines(string(list)) {
		if isIt(line) {
			return builtIn, nil
		}
	}
	err = filepath.WalkDir(dir, func(file string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() && isIt(file) {
			path, err = file, errFound
		}
		return err
	})
	switch {
	case errors.Is(err, errFound):
		return path, nil
	case err == nil || errors.Is(err, fs.ErrNotExist):
		return "", errkind.New(errkind.NotFound, "it is neither loaded in this guest nor found below %s", dir)
	}
	return "", fmt.Errorf("find it: %w", err)
}
