package blockdev

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSerialIsInUdevsNameForAVirtioDisk(t *testing.T) {
	for path, want := range map[string]string{
		"/dev/disk/by-id/virtio-dvzklycewkdo64v6wc":         "dvzklycewkdo64v6wc",
		"/dev/disk/by-id/virtio-" + strings.Repeat("x", 20): strings.Repeat("x", 20),
		"/dev/disk/by-id/virtio-" + strings.Repeat("x", 21): "",
		"/dev/disk/by-id/virtio-":                           "",
		"/dev/disk/by-id/virtio-a/b":                        "",
		"/dev/disk/by-id/virtio-a\x00":                      "",
		"/dev/disk/by-id/ata-a":                             "",
		"/dev/vda":                                          "",
	} {
		if got, ok := SerialIn(path); ok != (want != "") || got != want {
			t.Errorf("%q\nwant %q\ngot  %q, %v", path, want, got, ok)
		}
	}
}

func TestDeviceIsNamedByTheKernelsName(t *testing.T) {
	root := t.TempDir()
	block := filepath.Join(root, "sys/class/block/vda")
	if err := errors.Join(os.MkdirAll(block, 0o755), os.WriteFile(filepath.Join(block, "dev"), []byte("254:16\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	d, is, err := named(root, "/dev/vda")
	if want := (Device{Path: filepath.Join(root, "dev/vda"), Name: "vda", Number: unix.Mkdev(254, 16)}); !is || err != nil || d != want {
		t.Errorf("\nwant %+v\ngot  %+v, %v, error %v", want, d, is, err)
	}
	for _, path := range []string{"/dev/vdb", "/dev/", "/dev", "/dev/.", "/dev/..", "/dev/shm/x", "/dev/../dev/vda", "/dev/vda/", "/dev/vda\x00", "vda", ""} {
		if d, is, err := named(root, path); is || err != nil {
			t.Errorf("%q\nwant no device\ngot  %+v, %v, error %v", path, d, is, err)
		}
	}
}
