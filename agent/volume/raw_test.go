package volume

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// rawDisk returns a loop device without content, and its image.
func rawDisk(t *testing.T, bytes int64) (disk, image string) {
	t.Helper()
	image = filepath.Join(t.TempDir(), "disk")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, bytes)); err != nil {
		t.Fatal(err)
	}
	return mounttest.Attach(t, image), image
}

func TestGrowthOfARawDeviceAwaitsItsSize(t *testing.T) {
	disk, image := rawDisk(t, 64<<20)
	table := newTable()
	var steps []Progress
	err := table.Grow(t.Context(), disk, 96<<20, func(p Progress) error {
		if steps = append(steps, p); len(steps) == 1 {
			mounttest.SetSize(t, disk, image, 96<<20)
		}
		return nil
	})
	if want := []Progress{{From: 64 << 20, Now: 64 << 20, Goal: 96 << 20}, {From: 64 << 20, Now: 96 << 20, Goal: 96 << 20}}; err != nil || !reflect.DeepEqual(steps, want) {
		t.Errorf("\nwant %v\ngot  %v, error %v", want, steps, err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	for name, c := range map[string]struct {
		ctx  context.Context
		size uint64
		want errkind.Kind // Internal for no error
		says string
	}{
		"again":                        {t.Context(), 96 << 20, errkind.Internal, ""},
		"to its end":                   {t.Context(), 0, errkind.Internal, ""},
		"to less than a sector more":   {t.Context(), 96<<20 + 511, errkind.Internal, ""},
		"to its size, after the call":  {ended, 96 << 20, errkind.Internal, ""},
		"to less":                      {t.Context(), 96<<20 - 512, errkind.OutOfRange, "never shrinks"},
		"to more than it has":          {t.Context(), 128 << 20, errkind.DeadlineExceeded, "100663296"},
		"to more, after the call":      {ended, 128 << 20, errkind.DeadlineExceeded, "134217728"},
		"to more than a device can be": {t.Context(), 1 << 63, errkind.FailedPrecondition, "no device"},
	} {
		err := table.Resize(c.ctx, disk, c.size, time.Millisecond)
		if (err == nil) != (c.want == errkind.Internal) || err != nil && (errkind.Of(err) != c.want || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s\nwant kind %v with %q\ngot  %v", name, c.want, c.says, err)
		}
		check := table.CheckResize(t.Context(), disk, c.size)
		if want := c.want; want == errkind.DeadlineExceeded || want == errkind.Internal {
			if check != nil {
				t.Errorf("check %s\nwant no error, as the disk may grow\ngot  %v", name, check)
			}
		} else if errkind.Of(check) != want {
			t.Errorf("check %s\nwant kind %v\ngot  %v", name, want, check)
		}
	}
}

func TestRawDeviceIsMeasuredAndNothingElse(t *testing.T) {
	disk, _ := rawDisk(t, 64<<20)
	table := newTable()
	stats, err := table.Stats(t.Context(), disk)
	if want := (Stats{Bytes: Usage{Total: 64 << 20}, Unexamined: true}); err != nil || !reflect.DeepEqual(stats, want) {
		t.Errorf("\nwant %+v\ngot  %+v, error %v", want, stats, err)
	}
	report, err := table.Report(t.Context(), disk)
	if want := (Report{Path: disk, Devices: []string{disk}, DeviceBytes: 64 << 20}); err != nil || !reflect.DeepEqual(report, want) {
		t.Errorf("\nwant %+v\ngot  %+v, error %v", want, report, err)
	}
	if _, err := table.Trim(t.Context(), disk, 0); errkind.Of(err) != errkind.InvalidArgument {
		t.Errorf("trim\nwant kind %v\ngot  %v", errkind.InvalidArgument, err)
	}
	if list, err := table.List(t.Context()); err != nil {
		t.Error(err)
	} else {
		for _, r := range list {
			if r.Path == disk {
				t.Errorf("the list of mounts has %+v", r)
			}
		}
	}
}

// Somebody who names the disk of a mounted volume would take OK for a growth of its filesystem.
func TestMountedDeviceIsNoRawVolume(t *testing.T) {
	dir := mounttest.Dir(t)
	disk := mounttest.Attach(t, mounttest.Image(t, "ext4"))
	mounttest.Mount(t, disk, dir, "ext4", 0, "")
	table := newTable()
	_, statsErr := table.Stats(t.Context(), disk)
	_, reportErr := table.Report(t.Context(), disk)
	for call, err := range map[string]error{
		"Resize": table.Resize(t.Context(), disk, 0, 0), "CheckResize": table.CheckResize(t.Context(), disk, 0), "Stats": statsErr, "Report": reportErr,
		"Grow": table.Grow(t.Context(), disk, 0, func(Progress) error { return nil }),
	} {
		if errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s\nwant a FailedPrecondition that names %s\ngot  %v", call, dir, err)
		}
	}
}

func TestRawDeviceThatLeavesEndsTheWait(t *testing.T) {
	disk, _ := rawDisk(t, 64<<20)
	table := newTable()
	err := table.Grow(t.Context(), disk, 96<<20, func(Progress) error {
		mounttest.Run(t, "losetup", "-d", disk)
		return nil
	})
	if errkind.Of(err) != errkind.NotFound {
		t.Errorf("\nwant kind %v\ngot  %v", errkind.NotFound, err)
	}
	if _, err := table.Stats(t.Context(), "/dev/disk/by-id/virtio-nobody"); errkind.Of(err) != errkind.NotFound {
		t.Errorf("a serial that no disk has\nwant kind %v\ngot  %v", errkind.NotFound, err)
	}
}
