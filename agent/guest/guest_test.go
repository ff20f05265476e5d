package guest

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/protocols/agentpb"
)

// in returns a guest with its files below a directory, and the modules that it was asked to load.
func in(t *testing.T, init bool, files map[string]string) (g Guest, loaded map[string]string) {
	t.Helper()
	loaded = map[string]string{}
	g = newGuest(t.TempDir(), init, func(path, parameters string) error {
		loaded[filepath.Base(path)] = parameters
		return nil
	})
	write(t, g.root, files)
	return g, loaded
}

// write makes files below a directory.
func write(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for path, text := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestResolverIsWrittenAndRestored(t *testing.T) {
	for _, before := range []map[string]string{nil, {"etc/resolv.conf": "nameserver 192.0.2.1\n"}} {
		g, _ := in(t, true, before)
		path := filepath.Join(g.root, "etc/resolv.conf")
		undo, err := g.SetResolver([]string{"nameserver 192.0.2.2", "search x"})
		if err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(path); err != nil || string(text) != "nameserver 192.0.2.2\nsearch x\n" {
			t.Errorf("got %q, %v", text, err)
		}
		if err := undo(); err != nil {
			t.Fatal(err)
		}
		if text, _ := os.ReadFile(path); string(text) != before["etc/resolv.conf"] {
			t.Errorf("given back: %q", text)
		}
	}
}

func TestResolverAndModulesHaveBounds(t *testing.T) {
	g, _ := in(t, true, nil)
	line := strings.Repeat("#", resolverBytes-1) // plus the newline
	if _, err := g.SetResolver([]string{line}); err != nil {
		t.Errorf("of %d bytes: %v", resolverBytes, err)
	}
	for _, lines := range [][]string{{line + "#"}, {line, ""}, {"a\nb"}, {"\x00"}, {"\xff"}} {
		if _, err := g.SetResolver(lines); errkind.Of(err) != errkind.InvalidArgument {
			t.Errorf("%.20q\nwant an InvalidArgument\ngot  %v", lines, err)
		}
	}
	for length, want := range map[int]errkind.Kind{moduleBytes: errkind.NotFound, moduleBytes + 1: errkind.InvalidArgument} {
		err := g.LoadModules([]*agentpb.KernelModule{{Name: strings.Repeat("m", length)}})
		if errkind.Of(err) != want {
			t.Errorf("a module's name of %d bytes\nwant kind %d\ngot  %v", length, want, err)
		}
	}
}

func TestResolverOfAnotherInitIsLeftAlone(t *testing.T) {
	g, _ := in(t, false, nil)
	if _, err := g.SetResolver([]string{"nameserver 192.0.2.2"}); errkind.Of(err) != errkind.Unimplemented {
		t.Errorf("got %v", err)
	}
	if undo, err := g.SetResolver(nil); undo != nil || err != nil {
		t.Errorf("where nothing is asked for: %v", err)
	}
}

// modulesDir returns the directory of this kernel's modules.
func modulesDir(t *testing.T) string {
	t.Helper()
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		t.Fatal(err)
	}
	return "lib/modules/" + unix.ByteSliceToString(uts.Release[:]) + "/"
}

func TestModulesAreLoadedOnceAndWithTheirParameters(t *testing.T) {
	modules := modulesDir(t)
	g, loaded := in(t, true, map[string]string{
		modules + "kernel/fs/one-two.ko.xz": "", modules + "kernel/fs/three.ko": "", modules + "modules.builtin": "kernel/fs/four.ko\n",
		"sys/module/five/parameters/speed": "high\n",
	})
	for _, c := range []struct {
		module agentpb.KernelModule
		kind   errkind.Kind
		ok     bool
	}{
		{agentpb.KernelModule{Name: "one_two", Parameters: []string{"a=1", "b"}}, 0, true},
		{agentpb.KernelModule{Name: "three"}, 0, true},
		{agentpb.KernelModule{Name: "four"}, 0, true},
		{agentpb.KernelModule{Name: "four", Parameters: []string{"a=1"}}, errkind.FailedPrecondition, false},
		{agentpb.KernelModule{Name: "five", Parameters: []string{"speed=high"}}, 0, true},
		{agentpb.KernelModule{Name: "five", Parameters: []string{"speed=low"}}, errkind.FailedPrecondition, false},
		{agentpb.KernelModule{Name: "five", Parameters: []string{"../five=x"}}, errkind.InvalidArgument, false},
		{agentpb.KernelModule{Name: "six"}, errkind.NotFound, false},
		{agentpb.KernelModule{Name: ""}, errkind.InvalidArgument, false},
		{agentpb.KernelModule{Name: "a.ko"}, errkind.InvalidArgument, false},
	} {
		err := g.LoadModules([]*agentpb.KernelModule{&c.module})
		if (err == nil) != c.ok || err != nil && errkind.Of(err) != c.kind {
			t.Errorf("%v\ngot %v", c.module, err)
		}
	}
	if len(loaded) != 2 || loaded["one-two.ko.xz"] != "a=1 b" {
		t.Errorf("loaded: %q", loaded)
	}
	g.load = func(string, string) error { return errors.New("it is broken") }
	if err := g.LoadModules([]*agentpb.KernelModule{{Name: "three"}}); errkind.Of(err) != errkind.FailedPrecondition {
		t.Errorf("got %v", err)
	}
}

// A module's lines in the kernel's log begin with the module's name. Here the kernel logs a line
// about tmpfs, which stands for a module with that name.
func TestModuleThatIsRefusedSaysWhy(t *testing.T) {
	g, _ := in(t, true, map[string]string{modulesDir(t) + "tmpfs.ko": ""})
	dir := t.TempDir()
	g.load = func(string, string) error { return unix.Mount("tmpfs", dir, "tmpfs", 0, "size=lots") }
	err := g.LoadModules([]*agentpb.KernelModule{{Name: "tmpfs"}})
	if errors.Is(err, unix.EPERM) {
		t.Skipf("it asks the kernel for a mount: run it as root, with sudo go test -run '^%s$'", t.Name())
	}
	if errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "the guest's kernel says: tmpfs: Bad value for 'size'") {
		t.Errorf("want a FailedPrecondition in the kernel's words\ngot  %v", err)
	}
	g.load = func(string, string) error { return unix.EKEYREJECTED }
	if err := g.LoadModules([]*agentpb.KernelModule{{Name: "tmpfs"}}); err == nil || !strings.Contains(err.Error(), "has logged nothing about it") {
		t.Errorf("a module that the kernel has logged nothing about\nwant an error that says so\ngot  %v", err)
	}
}

// The kernel shows a bool as Y or N, a number in decimal, and some parameters not at all. For
// modules that this agent has loaded, the agent knows the parameters; for others it compares the
// values.
func TestModuleIsAskedForAgainWithItsParameters(t *testing.T) {
	shown := map[string]string{"sys/module/m/parameters/debug": "Y\n", "sys/module/m/parameters/irq": "16\n", "sys/module/m/parameters/name": "a b\n", "sys/module/m/parameters/ports": "1,16\n"}
	ours, loaded := in(t, true, map[string]string{modulesDir(t) + "m.ko": ""})
	mine := []string{"debug=1", "irq=0x10", "hidden=1"}
	load := func(g Guest, parameters ...string) error {
		return g.LoadModules([]*agentpb.KernelModule{{Name: "m", Parameters: parameters}})
	}
	if err := load(ours, mine...); err != nil || loaded["m.ko"] != "debug=1 irq=0x10 hidden=1" {
		t.Fatalf("got %v, loaded %q", err, loaded)
	}
	write(t, ours.root, shown)
	others, _ := in(t, true, shown)
	for _, c := range []struct {
		parameter      string
		ours, anothers bool
	}{
		{"debug=1", true, true}, {"debug=on", true, true}, {"debug", true, true}, {"debug=0", false, false}, {"debug=2", false, false},
		{"irq=0x10", true, true}, {"irq=020", true, true}, {"irq=16", true, true}, {"irq=17", false, false}, {"irq=", false, false},
		{"name=\"a b\"", true, true}, {"name=a", false, false},
		{"ports=1,0x10", true, true}, {"ports=1", false, false},
		{"hidden=1", true, true}, {"hidden=2", false, true}, {"hidden2", false, true},
	} {
		for name, it := range map[string]struct {
			Guest
			ok bool
		}{"loaded by this agent": {ours, c.ours}, "by another": {others, c.anothers}} {
			err := load(it.Guest, c.parameter)
			if (err == nil) != it.ok || err != nil && errkind.Of(err) != errkind.FailedPrecondition {
				t.Errorf("%s, with %s\nwant OK: %v\ngot  %v", name, c.parameter, it.ok, err)
			}
		}
	}
	if err := load(ours, mine...); err != nil {
		t.Errorf("the same call again: %v", err)
	}
}
