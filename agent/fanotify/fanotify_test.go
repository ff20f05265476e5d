package fanotify

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount/mounttest"
)

// record encodes an information record.
func record(kind byte, values ...uint32) []byte {
	b := []byte{kind, 0, 0, 0}
	for _, v := range values {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	binary.NativeEndian.PutUint16(b[2:], uint16(len(b)))
	return b
}

// message encodes an event.
func message(mask uint64, records ...[]byte) []byte {
	b := make([]byte, metadataBytes)
	for _, r := range records {
		b = append(b, r...)
	}
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	b[4] = unix.FANOTIFY_METADATA_VERSION
	binary.NativeEndian.PutUint16(b[6:], metadataBytes)
	binary.NativeEndian.PutUint64(b[8:], mask)
	return b
}

const minus30 = 1<<32 - 30

func TestEventsAreParsed(t *testing.T) {
	whole := message(unix.FAN_FS_ERROR, record(infoError, 117, 3), record(infoFID, 7, 8, 0, 0xff))
	file := message(unix.FAN_FS_ERROR, record(infoFID, 1, 2, 8, 1, 12, 0), record(99, 1), record(infoError, minus30, 1))
	lost, other := message(unix.FAN_Q_OVERFLOW), message(unix.FAN_OPEN, record(infoFID, 1, 2, 0, 0))
	var all []byte
	for _, b := range [][]byte{whole, file, lost, other} {
		all = append(all, b...)
	}
	var got []Event
	if err := parse(all, func(e Event) { got = append(got, e) }); err != nil {
		t.Fatal(err)
	}
	want := []Event{
		{Filesystem: unix.Fsid{Val: [2]int32{7, 8}}, Errno: unix.EUCLEAN, Count: 3},
		{Filesystem: unix.Fsid{Val: [2]int32{1, 2}}, Errno: unix.EROFS, Count: 1, OfFile: true},
		{Lost: true},
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("\nwant %+v\ngot  %+v", want, got)
	}
}

// FuzzEvents parses any bytes. An event that was encoded here is found again, whatever follows it.
func FuzzEvents(f *testing.F) {
	f.Add([]byte(nil), int32(117), uint32(1), int32(7), int32(8))
	f.Add(message(unix.FAN_FS_ERROR, record(infoFID, 1, 2)), int32(-30), uint32(2), int32(-1), int32(0))
	f.Add(message(unix.FAN_FS_ERROR, []byte{infoError, 0, 0, 0}), int32(-1<<31), uint32(0), int32(0), int32(0))
	f.Add(message(unix.FAN_FS_ERROR, []byte{infoError, 0, 255, 255}, record(infoError, 5)), int32(5), uint32(9), int32(1), int32(1))
	f.Add(message(unix.FAN_Q_OVERFLOW)[:metadataBytes-1], int32(108), uint32(1<<31), int32(2), int32(2))
	f.Fuzz(func(t *testing.T, rest []byte, number int32, count uint32, first, second int32) {
		b := message(unix.FAN_FS_ERROR, record(infoError, uint32(number), count), record(infoFID, uint32(first), uint32(second), 0, 0))
		var got []Event
		_ = parse(append(b, rest...), func(e Event) { got = append(got, e) })
		want := Event{Filesystem: unix.Fsid{Val: [2]int32{first, second}}, Errno: errno(number), Count: count}
		if len(got) == 0 || got[0] != want {
			t.Fatalf("\nwant %+v first\ngot  %+v", want, got)
		}
		if most := len(b) + len(rest); len(got) > most/metadataBytes {
			t.Errorf("%d events in %d bytes", len(got), most)
		}
	})
}

// opened returns a group, and its events until the test ends.
func opened(t *testing.T) (*Group, <-chan Event) {
	t.Helper()
	g, err := Open()
	if errors.Is(err, unix.EPERM) {
		t.Skipf("it opens a fanotify group: run it as root, with sudo go test -run '^%s$'", t.Name())
	} else if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	events, ended := make(chan Event, 100), make(chan error, 1)
	go func() { ended <- g.Follow(ctx, func(e Event) { events <- e }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Follow\nwant it to end with its context\ngot  %v", err)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g, events
}

func TestErrorOfAnExt4IsAnEvent(t *testing.T) {
	g, events := opened(t)
	dir := mounttest.Dir(t)
	disk := mounttest.Attach(t, mounttest.Image(t, "ext4"))
	mounttest.Mount(t, disk, dir, "ext4", 0, "errors=continue")
	id, err := g.Add(dir)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := g.Add(dir); again != id || err != nil {
		t.Errorf("added again\nwant %v\ngot  %v, error %v", id, again, err)
	}
	trigger := filepath.Join("/sys/fs/ext4", filepath.Base(disk), "trigger_fs_error")
	if err := os.WriteFile(trigger, []byte("provoked"), 0); err != nil {
		t.Fatal(err)
	}
	select {
	case e := <-events:
		if e.Filesystem != id || e.Errno != unix.EUCLEAN || e.Count == 0 || e.Lost {
			t.Errorf("want EUCLEAN of %v\ngot  %+v", id, e)
		}
	case <-time.After(time.Minute):
		t.Fatal("no event")
	}
}

// Somebody may unmount a filesystem that was added, and has its disk then.
func TestAddedFilesystemIsNotHeld(t *testing.T) {
	g, _ := opened(t)
	for _, fstype := range []string{"ext4", "xfs"} {
		dir := mounttest.Dir(t)
		disk := mounttest.Attach(t, mounttest.Image(t, fstype))
		for range 3 {
			mounttest.Mount(t, disk, dir, fstype, 0, "")
			if _, err := g.Add(dir); err != nil {
				t.Fatal(err)
			}
			if err := unix.Unmount(dir, 0); err != nil {
				t.Fatalf("%s: unmount: %v", fstype, err)
			}
			free, err := unix.Open(disk, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatalf("%s: its disk is not free: %v", fstype, err)
			}
			unix.Close(free)
		}
	}
}
