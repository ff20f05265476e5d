package rescue

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// bzImage returns the beginning of a kernel file with the given version.
func bzImage(version string) []byte {
	head := make([]byte, 0x400)
	copy(head[headerMagicAt:], headerMagic)
	binary.LittleEndian.PutUint16(head[versionOffsetAt:], 0x100)
	return append(append(head[:setupStart+0x100], version...), 0)
}

func TestReleaseIsReadFromTheKernelsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vmlinuz")
	must(t, os.WriteFile(path, bzImage("7.2.12-cloud-amd64 (builder@host) #1 SMP"), 0o600))
	if got, err := kernelVersion(path); err != nil || got != "7.2.12-cloud-amd64" {
		t.Errorf("want 7.2.12-cloud-amd64\ngot  %q, error %v", got, err)
	}
	must(t, os.WriteFile(path, []byte("no kernel"), 0o600))
	if got, err := kernelVersion(path); err == nil || !strings.Contains(err.Error(), path+" is not a kernel") {
		t.Errorf("want it refused\ngot  %q, error %v", got, err)
	}
}

func FuzzKernelVersion(f *testing.F) {
	f.Add(bzImage("7.2.12-cloud-amd64 (builder@host) #1 SMP"))
	f.Add(bzImage("7.2.12")[:0x210])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, head []byte) {
		got, err := versionIn(head, "vmlinuz")
		if len(got) > 2*maxVersion || printable(got) != got || err != nil && got != "" {
			t.Errorf("got %q, error %v", got, err)
		}
	})
}

func TestConsoleKeepsWhatTheKernelSaysOfFilesystems(t *testing.T) {
	var c console
	for _, part := range []string{"[    1.0] Booting\r\n[    2.1] XFS (vda): Ending ", "recovery\x1b[2J\r\nEXT4-fs (vda): recovery complete\n", strings.Repeat("x", 1<<20), "\nJBD2: x"} {
		if n, err := c.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatal(n, err)
		}
	}
	want := "XFS (vda): Ending recovery [2J|EXT4-fs (vda): recovery complete"
	if got := strings.Join(c.said(), "|"); got != want {
		t.Errorf("want %s\ngot  %s", want, got)
	}
	for range 10 * maxLines {
		c.Write([]byte("XFS (vda): " + strings.Repeat("y", 2*maxLine) + "\n"))
	}
	for _, line := range c.said() {
		if len(line) > maxLine {
			t.Errorf("a line of %d bytes", len(line))
		}
	}
	if got := len(c.said()); got != maxLines {
		t.Errorf("lines\nwant %d\ngot  %d", maxLines, got)
	}
}
