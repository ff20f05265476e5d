package blockdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/pcipath"
)

// sysfs makes a root directory whose sys/devices has two disks and a network card, laid out as in
// Linux 6.1, and returns the root:
//
//	pci0000:00
//	├── 0000:00:02.0            a bridge; its bus got the number 3
//	│   ├── pci_bus/0000:03
//	│   ├── 0000:03:01.0/virtio1/block/vda     without a diskseq, as before Linux 5.15
//	│   └── 0000:03:02.0/virtio3/net/eth0      no disk
//	└── 0000:00:05.0/virtio2/block/vdb         its diskseq is 7
func sysfs(t *testing.T) string {
	root := t.TempDir()
	for file, text := range map[string]string{
		"sys/devices/pci0000:00/0000:00:02.0/pci_bus/0000:03/cpuaffinity":           "1\n",
		"sys/devices/pci0000:00/0000:00:02.0/0000:03:01.0/virtio1/block/vda/dev":    "254:0\n",
		"sys/devices/pci0000:00/0000:00:02.0/0000:03:02.0/virtio3/net/eth0/ifindex": "2\n",
		"sys/devices/pci0000:00/0000:00:05.0/virtio2/block/vdb/dev":                 "254:16\n",
		"sys/devices/pci0000:00/0000:00:05.0/virtio2/block/vdb/diskseq":             "7\n",
	} {
		path := filepath.Join(root, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestPCIPathLeadsToItsDiskWhateverTheBusIsCalled(t *testing.T) {
	root := sysfs(t)
	for text, want := range map[string]Device{
		"02/01": {filepath.Join(root, "dev/vda"), "vda", unix.Mkdev(254, 0), 0},
		"05":    {filepath.Join(root, "dev/vdb"), "vdb", unix.Mkdev(254, 16), 7},
	} {
		path, err := pcipath.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		got, err := byPCIPath(root, path)
		if err != nil || got != want {
			t.Errorf("%s\nwant %+v\ngot  %+v, %v", text, want, got, err)
		}
	}
}

func TestMissingPCIDeviceIsReportedAsNotExisting(t *testing.T) {
	root := sysfs(t)
	for _, text := range []string{"02/03", "02/02", "03/01", "06", "02"} {
		path, err := pcipath.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := byPCIPath(root, path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s\nwant fs.ErrNotExist\ngot  %v", text, err)
		}
	}
}

func FuzzDeviceNumber(f *testing.F) {
	for _, seed := range []string{"254:0\n", "8:16", ":", "", "4294967296:0", "-1:0", "1:1:1"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		number, err := ParseNumber(text)
		if err != nil {
			return
		}
		again, err := ParseNumber(fmt.Sprintf("%d:%d\n", unix.Major(number), unix.Minor(number)))
		if err != nil || again != number {
			t.Errorf("%q is %#x, and written again %#x, %v", text, number, again, err)
		}
	})
}
