package blockdev

import (
	"bytes"
	"strings"
	"testing"
)

const resizeEvent = "change@/devices/pci0000:00/0000:00:02.0/0000:01:01.0/virtio1/block/vda\x00ACTION=change\x00DEVPATH=/devices/pci0000:00/0000:00:02.0/0000:01:01.0/virtio1/block/vda\x00SUBSYSTEM=block\x00RESIZE=1\x00MAJOR=254\x00MINOR=0\x00DEVNAME=vda\x00DEVTYPE=disk\x00SEQNUM=1234\x00"

func TestUeventKeepsItsVariables(t *testing.T) {
	e, err := parseUevent([]byte(resizeEvent))
	if err != nil {
		t.Fatal(err)
	}
	if e.action != "change" || e.vars["RESIZE"] != "1" || e.vars["SUBSYSTEM"] != "block" || !strings.HasSuffix(e.devpath, "/block/vda") {
		t.Errorf("got %+v", e)
	}
}

func TestMalformedUeventIsRefused(t *testing.T) {
	for _, text := range []string{"", "\x00", "add", "@/devices", "add@", "add@devices", "libudev\x00\xfe\xed\xca\xfe"} {
		if e, err := parseUevent([]byte(text)); err == nil {
			t.Errorf("%q was read as %+v", text, e)
		}
	}
	many := append([]byte("add@/x\x00"), bytes.Repeat([]byte("A=\x00"), 1)...)
	for i := range ueventVars + 1 {
		many = append(many, "K"+strings.Repeat("x", i)+"=v\x00"...)
	}
	if _, err := parseUevent(many); err == nil {
		t.Error("an event of too many variables was read")
	}
}

func FuzzUevent(f *testing.F) {
	f.Add([]byte(resizeEvent))
	f.Add([]byte("add@/module/vsock\x00ACTION=add\x00"))
	f.Add([]byte("remove@/\x00=\x00==\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := parseUevent(b)
		if err == nil && (e.action == "" || !strings.HasPrefix(e.devpath, "/") || len(e.vars) > ueventVars) {
			t.Errorf("%q was read as %+v", b, e)
		}
	})
}
