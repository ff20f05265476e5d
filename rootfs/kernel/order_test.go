package kernel

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

func openTree(t *testing.T, modules map[string][]string, builtIn ...string) *Kernel {
	t.Helper()
	k, err := Open(t.Context(), Source{Dir: kerneltest.Tree(t, modules, builtIn...)})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestOrderPutsNeedsFirst(t *testing.T) {
	modules := map[string][]string{
		"kernel/a.ko":              {"license=GPL", "depends="},
		"kernel/b.ko":              {"depends=a"},
		"kernel/c.ko":              {"depends=b,a"},
		"kernel/with-dash.ko":      {"depends=a", "name=with_dash"},
		"kernel/soft.ko":           {"softdep=pre: b post: c"},
		"kernel/softword.ko":       {"softdep=b"},
		"kernel/softalias.ko":      {"softdep=pre: sum", "depends=a"},
		"kernel/softmissing.ko":    {"softdep=pre: not-there", "depends=a"},
		"kernel/crypto/sum-one.ko": {"alias=sum"},
		"kernel/crypto/sum-two.ko": {"alias=sum", "alias=crypto-sum"},
		"kernel/selfish.ko":        {"alias=self", "softdep=pre: self"},
		"kernel/onbuiltin.ko":      {"depends=ext4", "softdep=pre: crc_generic crypto-crc"},
		"kernel/crc-fast.ko":       {"alias=crypto-crc"},
	}
	dir := kerneltest.Tree(t, modules, "kernel/fs/ext4/ext4.ko", "kernel/crypto/crc-generic.ko")
	kerneltest.WriteFile(t, dir+"/lib/modules/"+kerneltest.Version+"/modules.builtin.modinfo",
		[]byte("ext4.license=GPL\x00crc_generic.alias=crypto-crc\x00crc_generic.parm=x.alias=sum\x00\x00"))
	k, err := Open(t.Context(), Source{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		names []string
		want  string
	}{
		{[]string{"a"}, "a"},
		{[]string{"c"}, "a b c"},
		{[]string{"c", "a", "c"}, "a b c"},
		{[]string{"with-dash"}, "a with_dash"},
		{[]string{"with_dash"}, "a with_dash"},
		{[]string{"soft"}, "a b soft"},
		{[]string{"softword"}, "softword"},
		{[]string{"softalias"}, "sum_one sum_two a softalias"},
		{[]string{"softmissing"}, "a softmissing"},
		{[]string{"selfish"}, "selfish"},
		{[]string{"ext4", "onbuiltin"}, "onbuiltin"},
		{nil, ""},
	} {
		order, err := k.Order(test.names...)
		if err != nil {
			t.Errorf("order of %q: %v", test.names, err)
			continue
		}
		var got []string
		for _, m := range order {
			got = append(got, m.Name)
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("order of %q:\n got %q\nwant %q", test.names, strings.Join(got, " "), test.want)
		}
	}
}

func TestOrderNamesWhatItRefuses(t *testing.T) {
	k := openTree(t, map[string][]string{
		"kernel/a.ko":      {"depends=b"},
		"kernel/b.ko":      {"depends=c"},
		"kernel/c.ko":      {"depends=a"},
		"kernel/soft1.ko":  {"softdep=pre: soft2"},
		"kernel/soft2.ko":  {"depends=soft1"},
		"kernel/orphan.ko": {"depends=gone"},
		"kernel/broken.ko": {"no equals sign"},
	})
	for name, want := range map[string]string{
		"a":       "a → b → c → a",
		"soft1":   "soft1 → soft2 → soft1",
		"unknown": `no module "unknown"`,
		"orphan":  `no module "gone", needed by orphan`,
		"broken":  "broken.ko",
		"../a":    `no module "../a"`,
	} {
		_, err := k.Order(name)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("order of %q:\n got error %v\nwant one with %q", name, err, want)
		}
	}
}

func TestModulePathIsThatOfTheDecompressedModule(t *testing.T) {
	dir := kerneltest.Tree(t, map[string][]string{"kernel/a.ko": nil})
	module := kerneltest.Module("depends=a")
	root := filepath.Join(dir, "lib", "modules", kerneltest.Version)
	kerneltest.WriteFile(t, filepath.Join(root, "kernel/fs/b.ko.xz"), compress(t, ".xz", module))
	kerneltest.WriteFile(t, filepath.Join(root, "kernel/fs/c.ko.zst"), compress(t, ".zst", module))
	k, err := Open(t.Context(), Source{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"b": "kernel/fs/b.ko", "c": "kernel/fs/c.ko"} {
		order, err := k.Order(name)
		if err != nil || len(order) != 2 {
			t.Fatalf("order of %s: got %v, %v; want a and %s", name, order, err, name)
		}
		if got := order[1].Path; got != want {
			t.Errorf("path:\n got %s\nwant %s", got, want)
		}
		got, err := order[1].Read()
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, module) {
			t.Errorf("module %s decompressed:\n got %q\nwant %q", name, got, module)
		}
	}
}
