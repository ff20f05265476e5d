package xfsmonitor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount/mounttest"
)

// encoded returns an event as the kernel writes it.
func encoded(domain, kind uint32, errno int32) []byte {
	b := make([]byte, eventBytes)
	binary.NativeEndian.PutUint32(b, domain)
	binary.NativeEndian.PutUint32(b[4:], kind)
	binary.NativeEndian.PutUint32(b[44:], uint32(errno))
	return b
}

func TestEventsAreParsed(t *testing.T) {
	var all []byte
	for _, one := range [][]byte{encoded(0, 6, 0), encoded(8, 9, 5), encoded(8, 12, -5), encoded(1, 99, 77)} {
		all = append(all, one...)
	}
	var got []Event
	if err := parse(all, func(e Event) { got = append(got, e) }); err != nil {
		t.Fatal(err)
	}
	want := []Event{{Shutdown, 0}, {BufferedWrite, unix.EIO}, {DataLost, unix.EIO}, {99, 0}}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("\nwant %v\ngot  %v", want, got)
	}
	if err := parse(all[:len(all)-1], func(Event) {}); err == nil {
		t.Error("a part of an event is taken for a whole one")
	}
}

// FuzzEvents parses any bytes, behind an event that was encoded here.
func FuzzEvents(f *testing.F) {
	f.Add([]byte(nil), uint32(8), uint32(9), int32(5))
	f.Add([]byte("short"), uint32(0), uint32(6), int32(-1<<31))
	f.Add(encoded(8, 12, -5), uint32(8), uint32(1<<31), int32(-30))
	f.Fuzz(func(t *testing.T, rest []byte, domain, kind uint32, number int32) {
		b := append(encoded(domain, kind, number), rest...)
		var got []Event
		err := parse(b, func(e Event) { got = append(got, e) })
		if whole := len(b)%eventBytes == 0; whole != (err == nil) || whole && len(got) != len(b)/eventBytes {
			t.Fatalf("%d bytes\ngot  %d events, error %v", len(b), len(got), err)
		}
		if err == nil && (got[0].Type != Type(kind) || domain == fileDomain && got[0].Errno != errno(number) || domain != fileDomain && got[0].Errno != 0) {
			t.Errorf("domain %d, type %d, errno %d\ngot  %+v", domain, kind, number, got[0])
		}
		for _, e := range got {
			_ = e.String()
		}
	})
}

// A filesystem has a monitor that ends with its unmounting, or none at all. Nobody's unmount fails
// because of it.
func TestMonitorDoesNotHoldItsFilesystem(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs"} {
		dir := mounttest.Dir(t)
		disk := mounttest.Attach(t, mounttest.Image(t, fstype))
		mounttest.Mount(t, disk, dir, fstype, 0, "")
		root, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		monitor, err := Open(root)
		root.Close()
		if errors.Is(err, ErrUnsupported) {
			t.Logf("%s: %v", fstype, err)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- monitor.Follow(func(e Event) { t.Logf("%s: %v", fstype, e) }) }()
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("%s: unmount: %v", fstype, err)
		}
		if err := <-ended; err != nil {
			t.Errorf("%s: %v", fstype, err)
		}
		monitor.Close()
	}
}
