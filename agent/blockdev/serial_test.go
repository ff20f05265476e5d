package blockdev

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// page80 returns a unit serial number page.
func page80(serial string) string { return "\x00\x80\x00" + string(rune(len(serial))) + serial }

func TestSerialIsReadWhereEachBusHasIt(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		name  string
		want  string
	}{
		"virtio":                {map[string]string{"block/vda/serial": "pvc-1"}, "vda", "pvc-1"},
		"virtio, none":          {map[string]string{"block/vda/serial": ""}, "vda", ""},
		"SCSI":                  {map[string]string{"block/vda/device/vpd_pg80": page80("pvc-2   ")}, "vda", "pvc-2"},
		"NVMe":                  {map[string]string{"block/vda/device/serial": "pvc-3          \n"}, "vda", "pvc-3"},
		"a partition":           {map[string]string{"block/vda/serial": "pvc-4", "block/vda/vda1/partition": "1\n"}, "vda/vda1", "pvc-4"},
		"no serial":             {map[string]string{"block/vda/size": "7\n"}, "vda", ""},
		"SCSI, another page":    {map[string]string{"block/vda/device/vpd_pg80": "\x00\x83\x00\x01x"}, "vda", ""},
		"SCSI, a short page":    {map[string]string{"block/vda/device/vpd_pg80": "\x00\x80\xff\xffxy"}, "vda", "xy"},
		"SCSI, hardly any page": {map[string]string{"block/vda/device/vpd_pg80": "\x00\x80"}, "vda", ""},
	} {
		root := t.TempDir()
		for file, text := range c.files {
			path := filepath.Join(root, "sys/devices", file)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		link := filepath.Join(root, "sys/class/block", filepath.Base(c.name))
		if err := errors.Join(os.MkdirAll(filepath.Dir(link), 0o755), os.Symlink(filepath.Join(root, "sys/devices/block", c.name), link)); err != nil {
			t.Fatal(err)
		}
		if got := serialOf(root, filepath.Base(c.name)); got.text != c.want {
			t.Errorf("%s\nwant %q\ngot  %v", name, c.want, got)
		}
	}
	if got := serialOf(t.TempDir(), "vda"); got.text != "" {
		t.Errorf("no disk\nwant no serial\ngot  %v", got)
	}
}

func TestSerialMatchesTheRequestedOne(t *testing.T) {
	for _, c := range []struct {
		has      serial
		promised string
		want     bool
	}{
		{serial{text: "a"}, "a", true}, {serial{text: "a"}, "b", false}, {serial{}, "a", false}, {serial{text: "ab"}, "abc", false},
		{serial{strings.Repeat("x", virtioSerial), true}, strings.Repeat("x", 30), true},
		{serial{strings.Repeat("x", virtioSerial), true}, strings.Repeat("x", 19) + "yz", false},
	} {
		if got := c.has.is(c.promised); got != c.want {
			t.Errorf("%v, promised %q\nwant %v\ngot  %v", c.has, c.promised, c.want, got)
		}
	}
}

// A disk with another serial in the promised place may still be replaced until the deadline; then
// the error names both serials.
func TestDiskWithAnotherSerialIsNotFound(t *testing.T) {
	disk := mounttest.Attach(t, mounttest.Image(t, "ext4")) // a loop device has no serial
	if _, err := Find(t.Context(), disk, ""); err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Find(over, disk, "pvc-1")
	if errkind.Of(err) != errkind.FailedPrecondition && !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("with no time\nwant a FailedPrecondition\ngot  %v", err)
	}
	short, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err = Find(short, disk, "pvc-1")
	if errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), `"pvc-1"`) || !strings.Contains(err.Error(), disk+" has serial none") {
		t.Errorf("want a FailedPrecondition that names both\ngot  %v", err)
	}
}

func FuzzSerialPage(f *testing.F) {
	f.Add([]byte(page80("pvc-1")))
	f.Add([]byte("\x00\x80\xff\xff"))
	f.Fuzz(func(t *testing.T, page []byte) {
		if got := parseSerialPage(page); len(got) > max(0, len(page)-4) || got != strings.TrimSpace(got) {
			t.Errorf("%q of %q", got, page)
		}
	})
}
