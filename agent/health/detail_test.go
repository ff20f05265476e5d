package health

import (
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// constant checks that conditions have the same messages in all states of one fault, and that the
// log has details.
func constant(t *testing.T, states map[string][]Condition) {
	t.Helper()
	messages := map[string]string{}
	for state, conditions := range states {
		if len(conditions) == 0 {
			t.Errorf("%s: no condition", state)
		}
		for _, c := range conditions {
			if before, known := messages[c.Reason]; known && before != c.Message {
				t.Errorf("%s, %s\nwant %s\ngot  %s", state, c.Reason, before, c.Message)
			}
			messages[c.Reason] = c.Message
		}
	}
}

func TestMessageStaysTheSameWhileAConditionLasts(t *testing.T) {
	target := Target{Mountpoint: "/v", Device: blockdev.Device{Path: "/dev/vda", Name: "vda"}, FSType: "ext4"}
	states := map[string][]Condition{}
	for _, errno := range []unix.Errno{unix.EIO, unix.ENXIO, unix.ENODEV, unix.EUCLEAN, unix.ENOSPC, unix.EDQUOT, unix.ESHUTDOWN} {
		f := judge(target, "e2fsck -p", &fs.PathError{Op: "open", Path: "/v", Err: errno})
		states[errno.Error()] = f.conditions
		if len(f.details) != 1 || f.details[0] != errno.Error() {
			t.Errorf("details\nwant %v\ngot  %q", errno, f.details)
		}
	}
	for name, w := range map[string]*Watch{
		"few":  {past: Past{Failed: time.Unix(1, 0), Smaller: time.Unix(1, 0), Unreadable: 1, LastRead: "first"}, stall: stall{beats: hungBeats, last: counts{inFlight: 1}}},
		"many": {past: Past{Failed: time.Unix(9, 0), Smaller: time.Unix(9, 0), Unreadable: 9, LastRead: "ninth"}, stall: stall{beats: hungBeats, last: counts{inFlight: 64}}},
	} {
		w.target = target
		states[name+", remembered"], states[name+" in flight"] = w.remember(nil), w.all()
		if got := w.detail(); strings.Count(got, ";") != 3 {
			t.Errorf("%s: details\nwant four\ngot  %s", name, got)
		}
	}
	constant(t, states)
}

// More errors are recorded, and the disk becomes even smaller: the conditions stay the same.
func TestMessageOfAFilesystemStaysTheSameWhileAConditionLasts(t *testing.T) {
	image := mounttest.Image(t, "ext4")
	info, err := os.Stat(image)
	if err != nil {
		t.Fatal(err)
	}
	target := onImage(t, image, "ext4", "errors=continue")
	var all []finding
	for _, size := range []int64{info.Size() / 2, info.Size() / 4} {
		fails(t, target)
		mounttest.SetSize(t, target.Device.Path, image, size)
		f := examine(target, true, false)
		if len(f.conditions) != 2 || len(f.details) != 2 {
			t.Fatalf("want two conditions, with details\ngot  %+v", f)
		}
		all = append(all, f)
	}
	constant(t, map[string][]Condition{"first": all[0].conditions, "second": all[1].conditions})
	for i, detail := range all[0].details {
		if detail == all[1].details[i] {
			t.Errorf("nothing has changed: %s", detail)
		}
	}
}
