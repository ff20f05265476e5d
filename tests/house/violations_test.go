package house

import (
	"strings"
	"testing"
	"testing/fstest"
)

// violations has, for each rule, small trees that break it, each with text that the one complaint
// must contain.
var violations = map[string][]struct {
	files map[string]string
	want  string
}{
	"only the rooms at the top": {
		{files: map[string]string{"pkg/x.go": "package pkg"}, want: "pkg: no room"},
		{files: map[string]string{"main.go": "package main"}, want: "main.go: no room"},
	},
	"rooms import what the table says": {
		{files: one("agent/x/x.go", imports("host/qmp")), want: "agent may not import " + module + "/host/qmp"},
		{files: one("host/x/x.go", imports("agent/rpc")), want: "host may not import"},
		{files: one("host/x/x_test.go", imports("tests/vm")), want: "host may not import"},
		{files: one("protocols/x/x.go", imports("agent/rpc")), want: "protocols may not import"},
		{files: one("rootfs/x.go", imports("host/qemu")), want: "rootfs may not import"},
		{files: one("tests/x/x.go", imports("tools/demo")), want: "tests may not import"},
		{files: one("agent/x/x.go", "//go:build plan9\n\n"+imports("host/qmp")), want: "agent may not import"},
	},
	"the agent's packages import below": {
		{files: one("agent/storage/x.go", imports("agent/volume")), want: "agent/storage may not import agent/volume"},
		{files: one("agent/state/x.go", imports("agent/health")), want: "agent/state may not import agent/health"},
		{files: one("agent/mount/x.go", imports("agent/state")), want: "agent/mount may not import agent/state"},
		{files: one("agent/metrics/x.go", imports("agent/volume")), want: "agent/metrics may not import agent/volume"},
		{files: one("agent/server/x.go", imports("agent/rpc")), want: "agent/server may not import agent/rpc"},
		{files: one("agent/new/x.go", imports("agent/turns")), want: "agent/new has no floor"},
		{files: one("agent/rpc/x.go", imports("agent/mount/mounttest")), want: "agent/mount/mounttest has no floor"},
	},
	"programs start by package program": {
		{files: one("tools/x/main.go", "package main\nfunc main() {}"), want: "tools/x/main.go:2: main starts without package program"},
		{files: one("host/cmd/x/x.go", "package main\nimport _ \"flag\"\nfunc main() {}"), want: "host/cmd/x/x.go:3"},
	},
	"packages say what they are": {
		{files: one("agent/x/x.go", "package x"), want: "agent/x: no package comment"},
		{files: one("agent/x/x.go", "// Package y is another.\npackage x"), want: "agent/x: no package comment"},
		{files: one("agent/x/x.go", "// Package x is.\n\npackage x"), want: "agent/x: no package comment"},
		{files: one("tools/x/x.go", "// Package main is.\npackage main"), want: "tools/x: no package comment"},
		{files: one("tests/x/x_test.go", "// Package x is only tests.\npackage x"), want: "tests/x: no package comment"},
	},
	"exported identifiers have a contract": {
		{files: one("agent/x/x.go", "package x\nfunc F() {}"), want: "agent/x/x.go:2: F has no comment"},
		{files: one("agent/x/x.go", "package x\ntype T struct{}"), want: "T has no comment"},
		{files: one("agent/x/x.go", "package x\n// T is.\ntype T[A any] struct{}\nfunc (*T[A]) M() {}"), want: "M has no comment"},
		{files: one("agent/x/x.go", "package x\nvar a, B = 1, 2"), want: "B has no comment"},
		{files: one("agent/x/x.go", "package x\nconst (\n\ta = 1\n\tC = 2\n)"), want: "x.go:4: C has no comment"},
	},
	"comments wrap at 100 columns": {
		{files: one("agent/x/x.go", "// Package x "+strings.Repeat("is ", 29)+"x\npackage x"), want: "agent/x/x.go:1: a comment of 101 columns"},
		{files: one("agent/x/x.go", "package x\nfunc f() {\n\t// "+strings.Repeat("é ", 48)+"x\n}"), want: "agent/x/x.go:3: a comment of 104 columns"},
	},
	"names say what a thing is": {
		{files: one("agent/util/x.go", "package volume"), want: "agent/util: folder"},
		{files: one("agent/x/x.go", "package helpers"), want: "package helpers"},
		{files: one("agent/x/x_test.go", "package common_test"), want: "package common"},
		{files: one("deploy/misc/unit.service", ""), want: "deploy/misc: folder"},
	},
	"functions fit a screen": {
		{files: one("agent/x/x.go", "package x\nfunc f() {"+strings.Repeat("\n", screen)+"}"), want: "f has 71 lines"},
	},
	"nothing is waited for by sleeping": {
		{files: one("agent/x/x_test.go", "package x\nimport \"time\"\nfunc f() { time.Sleep(1) }"), want: "x_test.go:3: time.Sleep"},
		{files: one("agent/x/x.go", "package x\nimport clock \"time\"\nvar wait = clock.Sleep"), want: "clock.Sleep"},
		{files: one("agent/x/x.go", "package x\nimport . \"time\"\nfunc f() { Sleep(1) }"), want: "hides what it uses"},
	},
	"one place knows mounts by number": {
		{files: one("agent/x/x.go", "package x\nimport \"golang.org/x/sys/unix\"\nfunc f(st unix.Stat_t, disk uint64) bool { return st.Dev == disk }"), want: "x.go:3: reads st_dev"},
		{files: one("agent/x/x.go", "package x\nimport m \"github.com/moby/sys/mountinfo\"\nvar all = m.GetMounts"), want: "imports m"},
		{files: one("agent/mount/x/x.go", "package x\nfunc f(st *stat) int { return st.Dev_major }"), want: "reads st_dev"},
	},
	"conditions are made in one place": {
		{files: one("agent/x/x.go", "package x\nimport \""+module+"/agent/health\"\nvar c = health.Condition{Status: 1}"), want: "makes a condition"},
		{files: one("agent/x/x.go", "package x\nimport \""+module+"/agent/health\"\nvar all = []health.Condition{{Status: 1}}"), want: "makes a condition"},
		{files: one("agent/health/x.go", imports("agent/volume")), want: "imports agent/volume"},
		{files: one("agent/health/x.go", imports("agent/storage")), want: "imports agent/storage"},
	},
	"a skipped test says why": {
		{files: one("agent/x/x_test.go", "package x\nimport \"testing\"\nfunc TestX(t *testing.T) { t.Skip() }"), want: "x_test.go:3: skips without a word"},
		{files: one("agent/x/x_test.go", "package x\nimport \"testing\"\nfunc TestX(t *testing.T) { t.Skip(\"\") }"), want: "without a word"},
		{files: one("tests/vm/vm.go", "package vm\nimport \"testing\"\nfunc f(t testing.TB) { t.SkipNow() }"), want: "without a word"},
	},
	"go.mod names Go's version and no more": {
		{files: one("go.mod", "module m\n\ngo 1.25\n"), want: "no line go 1.26"},
		{files: one("go.mod", "module m\n\ngo 1.260\n"), want: "no line go 1.26"},
		{files: one("go.mod", "module m\n\ngo 1.26.0\n\ntoolchain go1.26.8\n"), want: "toolchain go1.26.8"},
		{files: map[string]string{}, want: "go.mod"},
		{files: map[string]string{"go.mod": "go 1.26\n", "tools/x/go.mod": "module x\n"}, want: "tools/x/go.mod: no line go 1.26"},
	},
	"modules build on this tree": {
		{files: map[string]string{"go.mod": "go 1.26\n", "tools/x/go.mod": "require " + module + " v1.0.0\n"}, want: "tools/x/go.mod: no line replace " + module + " => ../.."},
		{files: map[string]string{"go.mod": "go 1.26\n", "tools/x/go.mod": "replace " + module + " => ..\n"}, want: "tools/x/go.mod: no line replace"},
	},
	"every dependency is explained": {
		{files: map[string]string{"go.mod": "require (\n\texample.org/a v1.0.0\n)\n", "CONTRIBUTING.md": "We love `example.org/a`.\n"}, want: "`example.org/a`"},
		{files: map[string]string{"go.mod": "require example.org/a v1.0.0\n", "CONTRIBUTING.md": "| `example.org/ab` | x |\n"}, want: "`example.org/a`"},
		{files: map[string]string{"go.mod": "", "tools/x/go.mod": "require example.org/a v1.0.0\n", "CONTRIBUTING.md": ""}, want: "tools/x/go.mod: no row of CONTRIBUTING.md says what `example.org/a`"},
	},
	"README's program is the Example": {
		{files: map[string]string{"README.md": "```go\npackage main\n\nfunc main() { f() }\n```\n", example: "package sandbox_test\n\nfunc Example() { g() }\n"}, want: "line 3 of its program"},
		{files: map[string]string{"README.md": "```go\npackage main\n```\n", example: "package sandbox_test\n\nfunc Example() {}\n"}, want: "ends before line 3"},
		{files: map[string]string{"README.md": "none", example: "package sandbox_test\n"}, want: "0 programs"},
	},
	"links lead somewhere": {
		{files: one("docs/x.md", "see [y](y.md)"), want: "docs/x.md: a link leads to y.md"},
		{files: one("x.md", "![drawing](docs/x.svg#part)"), want: "x.md: a link leads to docs/x.svg"},
	},
	"each promise is held by something": {
		{files: map[string]string{}, want: specification},
		{files: limited("| a | held by |", "| it never fails | |"), want: "SPECIFICATION.md:3: what holds this?"},
		{files: limited("| a | held by |", "| it never fails | `TestY` |"), want: "no test is called TestY"},
		{files: limited("| a | held by |", "| it never fails | `TestX/another` |"), want: "no test is called TestX/another"},
		{files: limited("| a |", "| it never fails |"), want: "what holds this?"},
		{files: limited("| a | held by |", "| no test |"), want: "1 cells below a header of 2"},
		{files: map[string]string{specification: "", "README.md": "as `TestY` shows"}, want: "README.md: no test is called TestY"},
	},
	"the specification is the code's": {
		{files: map[string]string{}, want: specification},
		{files: limited("| constant | value |", "| `agent/x.limit` | 3 s |"), want: "SPECIFICATION.md:3: agent/x.limit is 2000000000 (durations in ns), not 3 s"},
		{files: limited("| constant | value |", "| `agent/x.limit` | 2 KiB |"), want: "not 2 KiB"},
		{files: limited("| constant | value |", "| `agent/x.limit` | 2 parsecs |"), want: "not 2 parsecs"},
		{files: limited("| constant | value |", "| `agent/x.other` | 2 s |", "| `agent/x.limit` | 2 s |"), want: "there is no constant agent/x.other"},
		{files: limited("| constant | value |"), want: "no row for the constant `agent/x.limit`"},
		{files: paged("agent/x/x.go", "package x\nconst maxText = 4 << 10"), want: "no row for the constant `agent/x.maxText`"},
		{files: paged(agentProgram+"/settings.go", "package main\nconst name = \"log\"\nvar all = []option{{\"log\", name, \"how much\", nil}}"), want: "no row for the setting agent.log -log"},
		{files: paged(agentProgram+"/settings.go", "package main\nimport \"time\"\nvar s = settings{hotplug: 3 * time.Second}"), want: "no setting of the specification has this default"},
		{files: paged("agent/health/x.go", "package health\nconst ReasonLost = \"Lost\""), want: "no row for the reason Lost"},
		{files: map[string]string{specification: "| reason | status |\n|---|---|\n| `Lost` | DEGRADED |", "agent/health/x.go": "package health\nconst ReasonLost = \"Lost\"\nvar x = condition{DataLoss, ReasonLost}"}, want: "x.go:3: ReasonLost has status DataLoss"},
		{files: paged("agent/x/x.go", "package x\nvar name = \"directvol_agent_things\""), want: "no row for the metric directvol_agent_things"},
		{files: paged("agent/x/x.go", "package x\nvar all = map[string]any{\"Freeze\": {Answer: method(freeze)}}"), want: "no row for the call Freeze"},
		{files: paged("agent/x/x.go", "package x\nvar all = map[string]any{\"Follow\": {Stream: stream(follow)}}"), want: "no row for the call Follow"},
		{files: paged("", "", "| call | code |", "|---|---|", "| any | `TEAPOT` |"), want: "there is no code TEAPOT"},
		{files: paged("host/x/x.go", "package x\nvar ErrLost = 1"), want: "no row for the error x.ErrLost"},
		{files: paged("", "", "| error |", "|---|", "| `x.ErrLost` |"), want: "the code has no error x.ErrLost"},
		{files: paged("host/x/x.go", "package x\nvar path = \"/run/x\"", "| file |", "|---|", "| `/run/y` |"), want: "no program names /run/y"},
	},
}

// clean breaks no rule, and is as close to breaking each as possible.
var clean = map[string]string{
	"agent/x/x.go": "// Package x is.\npackage x\nimport (\n\t\"time\"\n\t_ \"" + module + "/protocols/address\"\n)\n" +
		"// Both are.\nconst (\n\tA = 1\n\tB = 2\n)\nvar C time.Duration // is\ntype hidden struct{}\nfunc (hidden) M() {}\n" +
		"func f() {" + strings.Repeat("\n", screen-1) + "}\ntype bed struct{}\nfunc (bed) Sleep() {}\nfunc g(b bed) { b.Sleep() }",
	"agent/mount/mount.go":    "// Package mount is.\npackage mount\nimport _ \"github.com/moby/sys/mountinfo\"\nfunc f(st stat) int { return st.Dev }",
	"agent/storage/x.go":      "// Package storage is.\npackage storage\nimport _ \"" + module + "/agent/turns\"",
	"agent/storage/x_test.go": "package storage\nimport _ \"" + module + "/agent/volume\"",
	"agent/x/rdev.go":         "package x\nfunc f(st stat) int { return st.Rdev }",
	"host/x/x.go":             "// Package x is.\npackage x\nimport _ \"github.com/moby/sys/mountinfo\"\nfunc f(st stat) int { return st.Dev }",
	"agent/x/x_test.go":       "package x_test\nimport \"testing\"\nfunc TestX(t *testing.T) { t.Skip(\"it is Sunday: run it tomorrow\") }\nfunc Exported() {" + strings.Repeat("\n", screen) + "}",
	"agent/x/y_test.go":       "package x_test\nimport (\n\t\"testing/synctest\"\n\t\"time\"\n)\nfunc f() { time.Sleep(1); synctest.Wait() }",
	"protocols/xpb/x.pb.go":   "// Code generated by x. DO NOT EDIT.\n\npackage xpb\nfunc F() {" + strings.Repeat("\n", screen) + "}",
	"protocols/xpb/doc.go":    "// Package xpb is.\npackage xpb",
	"tools/demo/main.go":      "// Command demo is.\npackage main\nimport _ \"" + module + "/tests/vm\"\nimport \"" + module + "/protocols/program\"\nfunc main() { program.Main(nil) }",
	"build/util/x.go":         "package util",
	"rootfs/testdata/lib/x.c": "",
	".ci/run":                 "",
	"tools/y/go.mod":          "module y\n\ngo 1.26\n\nrequire (\n\texample.org/a v1.0.0\n\t" + module + " v0.0.0\n)\n\nreplace " + module + " => ../..\n",
	"README.md":               "```go\npackage main\n\nfunc main() {}\n```\n",
	example:                   "package sandbox_test\n\nfunc Example() {}\n",
	"host/sandbox/sandbox.go": "// Package sandbox is.\npackage sandbox",
	"go.mod":                  "module m\n\ngo 1.26.3\n\nrequire example.org/a v1.0.0\n\nrequire (\n\texample.org/b v1.0.0 // indirect\n)\n",
	"CONTRIBUTING.md":         "| `example.org/a` | is why, and [where](docs/x.md#why) |\n",
	"docs/x.md":               "[up](../CONTRIBUTING.md), [away](https://example.org/none.md), `TestX`, `TestX/it is Sunday: run it tomorrow`",
	"host/x/limit.go":         "package x\nimport \"time\"\nconst (\n\tlimit = 2 * time.Second\n\tmaxText = 4 << 10\n)\n// ErrX is.\nvar ErrX error\nconst path = \"/run/x\"",
	specification: "| constant | value | held by |\n|---|---|---|\n| `host/x.limit` | 2 s | no test |\n| `host/x.maxText` | 4 KiB | `TestX` |\n\n" +
		"| file | held by |\n|---|---|\n| `/run/x` | row `resize_ext4` |\n\n| error | held by |\n|---|---|\n| `x.ErrX` | `TestX` |\n",
}

// limited returns a tree with one limit and one test, and with a specification that has a table.
func limited(header string, rows ...string) map[string]string {
	return map[string]string{
		specification:       header + "\n|---|\n" + strings.Join(rows, "\n"),
		"agent/x/x.go":      "package x\nimport \"time\"\nconst limit = 2 * time.Second",
		"agent/x/x_test.go": "package x\nfunc TestX() {}",
	}
}

// paged returns a tree with one file, and with a specification of some lines.
func paged(path, text string, lines ...string) map[string]string {
	files := map[string]string{specification: strings.Join(lines, "\n")}
	if path != "" {
		files[path] = text
	}
	return files
}

func one(path, text string) map[string]string { return map[string]string{path: text} }

// imports returns a file that imports one of our packages.
func imports(inside string) string { return "package x\nimport _ \"" + module + "/" + inside + "\"" }

func fixture(t *testing.T, files map[string]string) *tree {
	mapped := fstest.MapFS{}
	for path, text := range files {
		mapped[path] = &fstest.MapFile{Data: []byte(text)}
	}
	return load(t, mapped)
}

func TestEveryRuleCatchesWhatBreaksIt(t *testing.T) {
	for name, broken := range rules {
		if len(violations[name]) == 0 {
			t.Errorf("nothing shows that the rule %q is looking: add a violation", name)
		}
		for _, v := range violations[name] {
			got := broken(fixture(t, v.files))
			if len(got) != 1 || !strings.Contains(got[0], v.want) {
				t.Errorf("%s: %v\nwant: one line with %q\n got: %q", name, v.files, v.want, got)
			}
		}
	}
}

func TestRulesLetAGoodTreePass(t *testing.T) {
	for name, broken := range rules {
		if got := broken(fixture(t, clean)); len(got) != 0 {
			t.Errorf("%s\nwant: nothing\n got: %q", name, got)
		}
	}
}
