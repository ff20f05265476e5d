package vm

import (
	"strings"
	"testing"
)

func TestConsoleKeepsItsEnd(t *testing.T) {
	var c console
	if got := c.tail(3); got != "" {
		t.Errorf("a guest that has printed nothing\ngot %q", got)
	}
	for range 3 * consoleBytes / 10 {
		if _, err := c.Write([]byte("a line…\r\n")); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Write([]byte("one\r\ntwo\r\nthree\r\n")); err != nil {
		t.Fatal(err)
	}
	if want, got := "two\nthree", c.tail(2); got != want {
		t.Errorf("want %q\ngot  %q", want, got)
	}
	if all := c.tail(1 << 30); len(all) > consoleBytes || !strings.HasSuffix(all, "\none\ntwo\nthree") {
		t.Errorf("want the last %d bytes at most\ngot  %d, ending with %q", consoleBytes, len(all), all[max(0, len(all)-20):])
	}
}

func TestMountedDeviceIsTheSourceAtThePath(t *testing.T) {
	const mountinfo = `25 1 0:23 / /run rw,nosuid shared:7 master:2 - tmpfs tmpfs rw
31 25 254:0 / /run/volume rw,relatime - ext4 /dev/vda rw
32 25 254:16 / /run/volume/inner rw - xfs /dev/vdb rw
`
	for path, want := range map[string]string{"/run": "tmpfs", "/run/volume": "/dev/vda", "/run/volume/inner": "/dev/vdb"} {
		if got, err := mountedDevice(mountinfo, path); err != nil || got != want {
			t.Errorf("%s\nwant %s\ngot  %s, error %v", path, want, got, err)
		}
	}
	for _, text := range []string{"", mountinfo, "31 25 254:0 / /run/other rw -", "31 25 254:0 / /run/other rw - ext4"} {
		if got, err := mountedDevice(text, "/run/other"); err == nil {
			t.Errorf("a path that is not mounted\ngot %s", got)
		}
	}
}
