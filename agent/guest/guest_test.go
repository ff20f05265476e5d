package guest

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/refusal"
	"github.com/directvol/directvol/protocols/agentpb"
)

// in is a guest whose files are below a folder, with the modules that it was asked to load.
func in(t *testing.T, init bool, files map[string]string) (g Guest, loaded map[string]string) {
	t.Helper()
	loaded = map[string]string{}
	g = Guest{t.TempDir(), init, func(path, parameters string) error {
		loaded[filepath.Base(path)] = parameters
		return nil
	}}
	for path, text := range files {
		path = filepath.Join(g.root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return g, loaded
}

func TestResolverIsWrittenAndGivenBack(t *testing.T) {
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

func TestResolverOfAnotherInitIsLeftAlone(t *testing.T) {
	g, _ := in(t, false, nil)
	if _, err := g.SetResolver([]string{"nameserver 192.0.2.2"}); refusal.KindOf(err) != refusal.Unimplemented {
		t.Errorf("got %v", err)
	}
	if undo, err := g.SetResolver(nil); undo != nil || err != nil {
		t.Errorf("where nothing is asked for: %v", err)
	}
}

func TestModulesAreLoadedOnceAndWithTheirParameters(t *testing.T) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		t.Fatal(err)
	}
	modules := "lib/modules/" + unix.ByteSliceToString(uts.Release[:]) + "/"
	g, loaded := in(t, true, map[string]string{
		modules + "kernel/fs/one-two.ko.xz": "", modules + "kernel/fs/three.ko": "", modules + "modules.builtin": "kernel/fs/four.ko\n",
		"sys/module/five/parameters/speed": "high\n",
	})
	for _, c := range []struct {
		module agentpb.KernelModule
		kind   refusal.Kind
		ok     bool
	}{
		{agentpb.KernelModule{Name: "one_two", Parameters: []string{"a=1", "b"}}, 0, true},
		{agentpb.KernelModule{Name: "three"}, 0, true},
		{agentpb.KernelModule{Name: "four"}, 0, true},
		{agentpb.KernelModule{Name: "four", Parameters: []string{"a=1"}}, refusal.FailedPrecondition, false},
		{agentpb.KernelModule{Name: "five", Parameters: []string{"speed=high"}}, 0, true},
		{agentpb.KernelModule{Name: "five", Parameters: []string{"speed=low"}}, refusal.FailedPrecondition, false},
		{agentpb.KernelModule{Name: "five", Parameters: []string{"../five=x"}}, refusal.InvalidArgument, false},
		{agentpb.KernelModule{Name: "six"}, refusal.NotFound, false},
		{agentpb.KernelModule{Name: ""}, refusal.InvalidArgument, false},
		{agentpb.KernelModule{Name: "a.ko"}, refusal.InvalidArgument, false},
	} {
		err := g.LoadModules([]*agentpb.KernelModule{&c.module})
		if (err == nil) != c.ok || err != nil && refusal.KindOf(err) != c.kind {
			t.Errorf("%v\ngot %v", c.module, err)
		}
	}
	if len(loaded) != 2 || loaded["one-two.ko.xz"] != "a=1 b" {
		t.Errorf("loaded: %q", loaded)
	}
	g.load = func(string, string) error { return errors.New("it is broken") }
	if err := g.LoadModules([]*agentpb.KernelModule{{Name: "three"}}); refusal.KindOf(err) != refusal.FailedPrecondition {
		t.Errorf("got %v", err)
	}
}
