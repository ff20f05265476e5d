package vhostvsock

import (
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/address"
)

// TestSocketsAreTheirOwnersAlone: only the owner can use the sockets. They are removed when the
// service ends, unless other files have their paths by then.
func TestSocketsAreTheirOwnersAlone(t *testing.T) {
	defer unix.Umask(unix.Umask(0))
	b, _ := startBackend(t)
	for _, path := range []string{b.cfg.Socket, b.cfg.UDSPath} {
		info, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := info.Mode(), fs.ModeSocket|0o600; got != want {
			t.Errorf("mode of %s\n got %v\nwant %v", path, got, want)
		}
	}
	if err := os.Remove(b.cfg.UDSPath); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(b.cfg.UDSPath, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b.Close()
	wantMissing(t, b.cfg.Socket)
	if _, err := os.Lstat(b.cfg.UDSPath); err != nil {
		t.Errorf("another program's file: %v", err)
	}
}

func TestTakenPathsAreRefusedAndUndisturbed(t *testing.T) {
	dir := t.TempDir()
	live := filepath.Join(dir, "live")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: live})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	long := filepath.Join(dir, strings.Repeat("x", address.MaxPath))
	for path, want := range map[string]string{
		live:                            "a running process listens on",
		file:                            "not a socket",
		long:                            "choose a shorter one",
		filepath.Join(dir, "none", "s"): "create its folder first",
		"":                              "empty",
	} {
		other := filepath.Join(dir, "other")
		for _, cfg := range []Config{{Socket: path, UDSPath: other, GuestCID: 3}, {Socket: other, UDSPath: path, GuestCID: 3}} {
			if _, err := Listen(cfg); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("listening on %q\n got error %v\nwant %q", path, err, want)
			}
			wantMissing(t, other)
		}
	}
	// The live listener did not notice the attempt: this connection is its first.
	c, err := net.Dial("unix", live)
	if err != nil {
		t.Fatal(err)
	}
	c.Write([]byte("me"))
	c.Close()
	got, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	b := make([]byte, 4)
	if n, _ := got.Read(b); string(b[:n]) != "me" {
		t.Errorf("first connection of the live listener said %q, want %q", b[:n], "me")
	}
}

func TestReservedCIDsAreRefused(t *testing.T) {
	dir := t.TempDir()
	for _, cid := range []uint64{0, 1, 2, 1<<32 - 1, 1 << 32, 1<<64 - 1} {
		b, err := Listen(Config{Socket: dir + "/q", UDSPath: dir + "/c", GuestCID: cid})
		if err == nil {
			b.Close()
			t.Errorf("guest CID %d was accepted", cid)
		}
	}
}
