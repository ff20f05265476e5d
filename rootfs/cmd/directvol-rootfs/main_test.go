package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/rootfs"
	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

func TestHelpShowsAnExampleAndEveryFlag(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), []string{"--help"}, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"--program /init=", "-program", "-module", "-suite", "-kernel-deb", "-kernel-dir", "-cache", "-out", "-kernel-out", "-json"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("help does not say %s:\n%s", want, out.String())
		}
	}
}

func TestErrorsAreOneLine(t *testing.T) {
	for _, args := range [][]string{
		{"--no-such-flag"},
		{"--program", "/init"},
		{"--program", "=x"},
		{"stray"},
		{"--kernel-dir", t.TempDir()},
		{"--kernel-dir", "a", "--kernel-deb", "b"},
		{"--kernel-deb", ""},
		{"--kernel-deb", "a", "--kernel-deb", "b", "--suite", "trixie"},
		{"--suite", "trixie\nTrusted: yes"},
	} {
		var out bytes.Buffer
		err := run(t.Context(), args, &out, io.Discard)
		if err == nil || strings.Contains(err.Error(), "\n") || out.Len() > 0 {
			t.Errorf("%q:\n got error %v and output %q\nwant an error of one line alone", args, err, out.String())
		}
	}
}

func TestAnswerIsForPeopleOrPrograms(t *testing.T) {
	modules := map[string][]string{}
	for _, name := range rootfs.DefaultModules() {
		modules["kernel/"+name+".ko"] = []string{"depends="}
	}
	init := filepath.Join(t.TempDir(), "init")
	kerneltest.WriteFile(t, init, kerneltest.Module())
	dir := t.TempDir()
	args := []string{"--kernel-dir", kerneltest.Tree(t, modules), "--program", "/init=" + init,
		"--out", filepath.Join(dir, "guest.cpio"), "--kernel-out", filepath.Join(dir, "vmlinuz")}
	var line, object bytes.Buffer
	if err := run(t.Context(), args, &line, io.Discard); err != nil {
		t.Fatal(err)
	}
	if want := "kernel " + kerneltest.Version + fmt.Sprintf(", %d modules, ", len(modules)); !strings.HasPrefix(line.String(), want) {
		t.Errorf("line:\n got %q\nwant it to begin with %q", line.String(), want)
	}
	if err := run(t.Context(), append(args, "--json"), &object, io.Discard); err != nil {
		t.Fatal(err)
	}
	var got rootfs.Result
	if err := json.Unmarshal(object.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Kernel != kerneltest.Version || len(got.Modules) != len(modules) || got.ImageBytes == 0 || got.KernelBytes == 0 {
		t.Errorf("result:\n got %+v\nwant all fields set", got)
	}
}
