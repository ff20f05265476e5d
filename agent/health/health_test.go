package health

import (
	"io/fs"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
)

func TestKernelLogNamesADeviceAsAWord(t *testing.T) {
	for message, want := range map[string]bool{
		"I/O error, dev vda, sector 8 op 0x1:(WRITE)":               true,
		"Aborting journal on device vda-8.":                         true,
		"XFS (vda): log I/O error -5":                               true,
		"EXT4-fs error (device vda): ext4_journal_check_start:83":   true,
		"vda: detected capacity change from 131072 to 1048576":      true,
		"I/O error, dev vdaa, sector 8":                             false,
		"virtio_blk virtio1: [nvda] 131072 512-byte logical blocks": false,
		"": false,
	} {
		if got := mentions([]byte(message), "vda"); got != want {
			t.Errorf("%q\nwant %v\ngot  %v", message, want, got)
		}
	}
}

func TestKmsgRecordIsCutToItsMessage(t *testing.T) {
	record := "3,1234,5678901,-;I/O error, dev vda, sector 8\n SUBSYSTEM=block\n DEVICE=b254:0\n"
	if got, kernels := messageOf([]byte(record)); string(got) != "I/O error, dev vda, sector 8" || !kernels {
		t.Errorf("got %q, %v", got, kernels)
	}
	for _, record := range []string{"11,1,2,-;I/O error, dev vda, sector 8\n", ";x", "x,1;y", ""} {
		if got, kernels := messageOf([]byte(record)); kernels {
			t.Errorf("%q is taken for the kernel's: %q", record, got)
		}
	}
}

func TestEveryFailureOfAProbeIsAConditionToActOn(t *testing.T) {
	for errno, test := range map[unix.Errno]struct {
		fstype string
		status Status
		reason string
		advice string
	}{
		unix.EROFS:  {"ext4", Inaccessible, ReasonReadOnly, "e2fsck -p"},
		unix.EIO:    {"xfs", Inaccessible, ReasonShutdown, "unmount and mount it again"},
		unix.ENXIO:  {"ext4", Inaccessible, ReasonIOError, "mend the disk"},
		unix.ENOSPC: {"xfs", Degraded, ReasonOutOfSpace, "grow the volume"},
	} {
		target := Target{Mountpoint: "/v", Device: blockdev.Device{Path: "/dev/vda", Name: "vda"}, FSType: test.fstype}
		got := judge(target, &fs.PathError{Op: "open", Path: "/v", Err: errno}).conditions
		if len(got) != 1 || got[0].Status != test.status || got[0].Reason != test.reason || !strings.Contains(got[0].Message, test.advice) || !strings.Contains(got[0].Message, "/dev/vda") {
			t.Errorf("%v: got %+v", errno, got)
		}
	}
}

func TestWhatIsNotTheFilesystemsFaultIsNoCondition(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOMEM, unix.EMFILE, unix.EOPNOTSUPP, unix.EPERM, unix.ENOENT} {
		got := judge(Target{FSType: "ext4"}, &fs.PathError{Op: "open", Path: "/v", Err: errno})
		if len(got.conditions) > 0 || got.failure == nil {
			t.Errorf("%v: got %+v", errno, got)
		}
	}
}

func TestFailedReadsAreToldApartFromWrites(t *testing.T) {
	if !isReadError([]byte("I/O error, dev vda, sector 16576 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2")) {
		t.Error("a read is not seen")
	}
	if isReadError([]byte("I/O error, dev vda, sector 16576 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2")) {
		t.Error("a write is taken for a read")
	}
}

func TestWritesAreTheFifthFieldOfStat(t *testing.T) {
	for text, want := range map[string]uint64{
		"     420        0    13720       84     1536      310   196608     2210        0     1804     2412        0        0        0        0      117      117\n": 1536,
		"1 2 3 4 -5": 0,
		"1 2 3":      0,
		"":           0,
	} {
		if got := parseWrites(text); got != want {
			t.Errorf("%q\nwant %d\ngot  %d", text, want, got)
		}
	}
}

func TestHealthyIsOKOnTheWire(t *testing.T) {
	if abnormal, message := Summary(nil); abnormal || message != "OK" {
		t.Errorf("got %v, %q", abnormal, message)
	}
	abnormal, message := Summary([]Condition{{Degraded, "A", "one"}, {Inaccessible, "B", "two"}})
	if !abnormal || message != "one; two" {
		t.Errorf("got %v, %q", abnormal, message)
	}
}
