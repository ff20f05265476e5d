package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
)

// scsiSysfs makes the part of /sys that SCSI disks have, as Linux 6.1 lays it out: the buses'
// entries are links to the devices'.
//
//	host0 (AHCI)         0:0:0:5 is a CD drive: no block/ until its driver is there; 0:0:0:0 and 0:0:2:0 are disks
//	host2 (virtio-scsi)  2:0:0:0/block/sda, 2:0:0:10/block/sdb, 2:0:1:0/block/sdc
func scsiSysfs(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	bus := filepath.Join(root, "sys/bus/scsi/devices")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(bus, 0o755))
	for at, disk := range map[string]string{"0:0:0:5": "", "0:0:0:0": "sdx 65:0", "0:0:2:0": "sdy 65:16", "2:0:0:0": "sda 8:0", "2:0:0:10": "sdb 8:16", "2:0:1:0": "sdc 8:32"} {
		dir := filepath.Join(root, "sys/devices/pci0000:00/host"+at[:1]+"/target"+at[:3], at)
		must(os.MkdirAll(dir, 0o755))
		if name, number, ok := strings.Cut(disk, " "); ok {
			must(os.MkdirAll(filepath.Join(dir, "block", name), 0o755))
			must(os.WriteFile(filepath.Join(dir, "block", name, "dev"), []byte(number+"\n"), 0o644))
		}
		must(os.Symlink(dir, filepath.Join(bus, at)))
	}
	for host, driver := range map[string]string{"host0": "ahci", "host2": "virtio_scsi", "host3": "virtio_scsi"} {
		dir := filepath.Join(root, "sys/class/scsi_host", host)
		must(os.MkdirAll(dir, 0o755))
		must(os.WriteFile(filepath.Join(dir, "proc_name"), []byte(driver+"\n"), 0o644))
		must(os.WriteFile(filepath.Join(dir, "scan"), nil, 0o644))
	}
	return root
}

func TestSCSIAddressLeadsToItsDiskAlone(t *testing.T) {
	root := scsiSysfs(t)
	for text, want := range map[string]Device{
		"0:0":  {filepath.Join(root, "dev/sda"), "sda", unix.Mkdev(8, 0), 0},
		"0:10": {filepath.Join(root, "dev/sdb"), "sdb", unix.Mkdev(8, 16), 0},
		"1:0":  {filepath.Join(root, "dev/sdc"), "sdc", unix.Mkdev(8, 32), 0},
	} {
		address, err := parseSCSI(text)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := address.look(root); err != nil || len(got) != 1 || got[0] != want {
			t.Errorf("%s\nwant %+v\ngot  %+v, %v", text, want, got, err)
		}
	}
	for _, absent := range []scsiAddress{{0, 1}, {0, 100}, {2, 0}, {0, 5}} {
		if got, err := absent.look(root); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%v\nwant fs.ErrNotExist\ngot  %+v, %v", absent, got, err)
		}
	}
}

// If two controllers have a disk at the same address, only the serial can select one.
func TestSCSIAddressOfTwoDisksIsRefused(t *testing.T) {
	root := scsiSysfs(t)
	bus := filepath.Join(root, "sys/bus/scsi/devices")
	if err := os.Symlink(filepath.Join(bus, "2:0:0:0"), filepath.Join(bus, "3:0:0:0")); err != nil {
		t.Fatal(err)
	}
	got, err := (scsiAddress{0, 0}).look(root)
	if err != nil || len(got) != 2 {
		t.Fatalf("want both\ngot  %+v, %v", got, err)
	}
	look := func() ([]Device, error) { return got, nil }
	if got, err := awaitDevice(t.Context(), "", look); errkind.Of(err) != errkind.FailedPrecondition {
		t.Errorf("want an error that does not wait\ngot  %+v, %v", got, err)
	}
}

func TestScanAsksEveryControllerForTheOneUnit(t *testing.T) {
	root := scsiSysfs(t)
	if err := (scsiAddress{1, 7}).scan(t.Context(), root); err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]string{"host0": "", "host2": "0 1 7", "host3": "0 1 7"} { // an AHCI controller has no such unit
		text, err := os.ReadFile(filepath.Join(root, "sys/class/scsi_host", host, "scan"))
		if err != nil || string(text) != want {
			t.Errorf("%s\nwant %q\ngot  %q, %v", host, want, text, err)
		}
	}
	if err := (scsiAddress{1, 7}).scan(t.Context(), t.TempDir()); err == nil || !strings.Contains(err.Error(), "no virtio-scsi controller") {
		t.Errorf("without a controller\nwant an error that names it\ngot  %v", err)
	}
}

// A unit that is requested without time to wait is only looked for: a check whether a disk has left
// must not bring the disk back.
func TestLookupOfASCSIUnitStartsNoScan(t *testing.T) {
	root := scsiSysfs(t)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := findSCSI(over, root, "1:7", ""); !errors.Is(err, context.Canceled) {
		t.Errorf("want it not found\ngot  %v", err)
	}
	if text, err := os.ReadFile(filepath.Join(root, "sys/class/scsi_host/host2/scan")); err != nil || len(text) > 0 {
		t.Errorf("want no scan\ngot  %q, %v", text, err)
	}
}

// hangingFile makes every open of a file for writing hang, like a controller that hangs. written
// ends that, waits for last and returns what was written.
func hangingFile(t *testing.T, path string) (written func(last func()) string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.RemoveAll(path), unix.Mkfifo(path, 0o600)); err != nil {
		t.Fatal(err)
	}
	return func(last func()) string {
		t.Helper()
		file, err := os.OpenFile(path, os.O_RDWR, 0) // open both ends, so that no open hangs any more
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		last()
		text := make([]byte, 4096)
		n, err := file.Read(text)
		if err != nil {
			t.Fatal(err)
		}
		return string(text[:n])
	}
}

// givenUp makes a call several times, and gives up each time.
func givenUp(t *testing.T, times int, call func(context.Context)) {
	t.Helper()
	for range times {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		call(ctx)
		cancel()
	}
}

func TestControllerThatHangsIsScannedOnceForAUnit(t *testing.T) {
	root := scsiSysfs(t)
	written := hangingFile(t, filepath.Join(root, "sys/class/scsi_host/host2/scan"))
	for _, address := range []scsiAddress{{1, 7}, {2, 7}} {
		givenUp(t, 5, func(ctx context.Context) {
			if err := address.scan(ctx, root); !errors.Is(err, errGoesOn) {
				t.Errorf("%v\nwant it given up\ngot  %v", address, err)
			}
		})
	}
	if err := (unitScan{filepath.Join(root, "sys/class/scsi_host/host3"), scsiAddress{1, 7}}).run(t.Context()); err != nil {
		t.Errorf("the other controller: %v", err)
	}
	text := written(func() {
		if err := (scsiAddress{9, 9}).scan(t.Context(), root); err != nil {
			t.Error(err)
		}
	})
	for _, want := range []string{"0 1 7", "0 2 7"} {
		if n := strings.Count(text, want); n > 1 {
			t.Errorf("scans %q\nwant 1\ngot  %d", want, n)
		}
	}
}

func TestDiskThatHangsIsAskedForItsCapacityOnce(t *testing.T) {
	root := t.TempDir()
	written := hangingFile(t, filepath.Join(root, "sys/class/block/sda/device/rescan"))
	disk := Device{Name: "sda"}
	givenUp(t, 5, func(ctx context.Context) { disk.rescan(ctx, root) })
	text := written(func() { disk.rescan(t.Context(), root) })
	if len(text) > 2 {
		t.Errorf("want it asked once, and once more by the last call\ngot  %q", text)
	}
}

func TestWaitForAMissingSCSIUnitEndsWithItsCaller(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := FindSCSI(over, fmt.Sprintf("%d:%d", scsiTargets-1, scsiUnits-1), "")
	if !errors.Is(err, context.Canceled) {
		t.Errorf("want it given up\ngot  %v", err)
	}
	for _, text := range []string{"", ":", "1", "1:", ":1", "0:0:0", "256:0", "0:16384", "-1:0", "+1:0", "0x1:0", "1 :0", "*:*", "02/01"} {
		if _, err := FindSCSI(over, text, ""); errkind.Of(err) != errkind.InvalidArgument {
			t.Errorf("%q\nwant an InvalidArgument\ngot  %v", text, err)
		}
	}
}

func FuzzSCSIAddress(f *testing.F) {
	for _, seed := range []string{"0:0", "255:16383", "256:0", "01:1", "*:?", "1:1\n", "0:99999999999999999999"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		address, err := parseSCSI(text)
		if err != nil {
			return
		}
		again, err := parseSCSI(fmt.Sprintf("%d:%d", address.target, address.unit))
		if err != nil || again != address || address.target >= scsiTargets || address.unit >= scsiUnits {
			t.Errorf("%q is %v, and written again %v, %v", text, address, again, err)
		}
	})
}
