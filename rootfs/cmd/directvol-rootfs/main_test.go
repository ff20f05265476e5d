package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/protocols/modulelist"
	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/program/programtest"
	"github.com/directvol/directvol/rootfs"
	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

func run(t *testing.T, args ...string) programtest.Result {
	return programtest.Run(t.Context(), newCommand(), args...)
}

func TestHelpShowsAnExampleAndEveryFlag(t *testing.T) {
	got := run(t, "--help")
	for _, want := range []string{"--program /init=", "--program ", "--module ", "--suite ", "--kernel-deb ", "--kernel-dir ", "--cache ", "--out ", "--kernel-out ", "--json ", "--version"} {
		if got.Exit != program.OK || !strings.Contains(got.Stdout, want) {
			t.Errorf("help does not say %s:\n%+v", want, got)
		}
	}
}

func TestWrongCommandLineIsOneLineAndExit2(t *testing.T) {
	for _, args := range [][]string{
		{"--no-such-flag"},
		{},
		{"--program", "/init"},
		{"--program", "=x"},
		{"stray"},
		{"--kernel-dir", "a", "--kernel-deb", "b"},
		{"--kernel-deb", ""},
		{"--kernel-deb", "a", "--kernel-deb", "b", "--suite", "trixie"},
		{"--suite", "trixie\nTrusted: yes"},
	} {
		if got := run(t, args...); got.Exit != program.WrongUsage || strings.Count(got.Stderr, "\n") != 1 || got.Stdout != "" {
			t.Errorf("%q\nwant exit 2, and an error of one line alone\ngot  %+v", args, got)
		}
	}
}

func TestAnswerIsForPeopleOrPrograms(t *testing.T) {
	modules := map[string][]string{}
	for _, name := range append(modulelist.Names(), modulelist.Btrfs) {
		modules["kernel/"+name+".ko"] = []string{"depends="}
	}
	init := filepath.Join(t.TempDir(), "init")
	kerneltest.WriteFile(t, init, kerneltest.Module())
	dir := t.TempDir()
	args := []string{"--kernel-dir", kerneltest.Tree(t, modules), "--program", "/init=" + init,
		"--out", filepath.Join(dir, "guest.cpio"), "--kernel-out", filepath.Join(dir, "vmlinuz")}
	line := run(t, args...)
	if want := "kernel " + kerneltest.Version + fmt.Sprintf(", %d modules, ", len(modulelist.Names())); line.Exit != program.OK || !strings.HasPrefix(line.Stdout, want) {
		t.Errorf("line\nwant it to begin with %q\ngot  %+v", want, line)
	}
	object := run(t, append(args, "--json")...)
	var got rootfs.Result
	if err := json.Unmarshal([]byte(object.Stdout), &got); err != nil {
		t.Fatal(err)
	}
	if got.Kernel != kerneltest.Version || len(got.Modules) != len(modulelist.Names()) || got.ImageBytes == 0 || got.KernelBytes == 0 {
		t.Errorf("result:\n got %+v\nwant all fields set", got)
	}
}

// A misspelt path must not be made as a directory, and nothing must be downloaded for it.
func TestMissingFolderIsRefusedAndNotMade(t *testing.T) {
	t.Setenv("PATH", "")
	init := filepath.Join(t.TempDir(), "init")
	kerneltest.WriteFile(t, init, kerneltest.Module())
	dir := t.TempDir()
	for _, flag := range []string{"--out", "--kernel-out"} {
		missing := filepath.Join(dir, "nope")
		got := run(t, "--program", "/init="+init, "--cache", filepath.Join(dir, "cache"), "--out", filepath.Join(dir, "i"), "--kernel-out", filepath.Join(dir, "k"), flag, filepath.Join(missing, "x"))
		if got.Exit != program.Failed || !strings.Contains(got.Stderr, missing+"/x: its folder is missing") {
			t.Errorf("%s\nwant exit 1, and the file whose folder is missing\ngot  %+v", flag, got)
		}
		if made, err := os.ReadDir(dir); err != nil || len(made) > 0 {
			t.Errorf("%s made %v, %v", flag, made, err)
		}
	}
}

// A folder in the way must be noticed before anything is downloaded.
func TestFolderInTheWayIsRefusedBeforeTheDownload(t *testing.T) {
	t.Setenv("PATH", "")
	init := filepath.Join(t.TempDir(), "init")
	kerneltest.WriteFile(t, init, kerneltest.Module())
	dir, folder := t.TempDir(), t.TempDir()
	for _, flag := range []string{"--out", "--kernel-out"} {
		got := run(t, "--program", "/init="+init, "--cache", filepath.Join(dir, "cache"), "--out", filepath.Join(dir, "i"), "--kernel-out", filepath.Join(dir, "k"), flag, folder)
		if got.Exit != program.Failed || !strings.Contains(got.Stderr, folder+" exists and is not a regular file") {
			t.Errorf("%s\nwant exit 1, and the folder in the way\ngot  %+v", flag, got)
		}
	}
}
