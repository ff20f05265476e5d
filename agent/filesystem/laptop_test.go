package filesystem

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// ownLaptop returns a switch whose setting is a file with the old value: the growths of other tests
// switch the machine's at the same time.
func ownLaptop(t *testing.T, was string) (l *laptopSwitch, is func(want string)) {
	t.Helper()
	l = &laptopSwitch{file: filepath.Join(t.TempDir(), "laptop_mode")}
	if err := os.WriteFile(l.file, []byte(was+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return l, func(want string) {
		t.Helper()
		if got, err := os.ReadFile(l.file); err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("laptop mode\nwant %s\ngot  %q, error %v", want, got, err)
		}
	}
}

func TestLaptopModeIsOnForItsUsersAlone(t *testing.T) {
	for was, want := range map[string]string{"0": "0", "5": "5", laptopMark: "0"} {
		l, is := ownLaptop(t, was)
		for range 2 {
			l.on()
			is("1009")
			l.on()
			l.off()
			is("1009")
			l.off()
			is(want)
		}
		l, is = ownLaptop(t, was)
		l.end() // as an agent that starts
		is(want)
	}
}

// The sync of a disk that hangs goes on after laptop mode is off again.
func TestLaptopModeDoesNotOutlastItsLimit(t *testing.T) {
	file, server := mounttest.ServeDisk(t, mounttest.Image(t, "xfs"))
	dir := mounttest.Dir(t)
	mounttest.Mount(t, mounttest.Attach(t, file), dir, "xfs", 0, "")
	if err := os.WriteFile(filepath.Join(dir, "file"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	server.GateWrites(gate)
	defer close(gate)
	l, is := ownLaptop(t, "0")
	began := time.Now()
	l.syncfs(open(t, dir))
	if took := time.Since(began); took < laptopLimit {
		t.Errorf("want it on for %v\ngot  %v: the disk does not hang", laptopLimit, took)
	}
	is("0")
}

// The folder stands for that of an xfs on the image, whose kernel never writes the header.
func TestHeaderThatIsNeverWrittenEndsTheWait(t *testing.T) {
	path := makeXFS(t, 304<<20, "-d", "agsize=76m")
	const group, length = 76 << 20, 12
	image, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	if _, err := image.WriteAt([]byte{0, 0, 0, 1}, group+512+length); err != nil { // of the group 1
		t.Fatal(err)
	}
	own, _ := ownLaptop(t, "0")
	defer func(file string) { laptop.file = file }(laptop.file)
	laptop.file = own.file
	d, err := openXFSDisk(Mounted{Disk: image, Dir: open(t, "/proc"), Proven: &Proven{whole: 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	var g xfsGeom
	for at, value := range map[int]uint32{0: 4096, 8: group / 4096, 20: 512} {
		binary.NativeEndian.PutUint32(g[at:], value)
	}
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		err := d.awaitWhole(t.Context(), &g, 2)
		if errkind.Of(err) != errkind.DeadlineExceeded || !strings.Contains(err.Error(), "try again") || time.Since(began) != wholeLimit {
			t.Errorf("want a DeadlineExceeded after %v\ngot  %v after %v", wholeLimit, err, time.Since(began))
		}
	})
	if _, err := image.WriteAt(binary.BigEndian.AppendUint32(nil, group/4096), group+512+length); err != nil {
		t.Fatal(err)
	}
	if err := d.awaitWhole(t.Context(), &g, 2); err != nil || d.Proven.whole != 2 {
		t.Errorf("once it is written\nwant it seen\ngot  %v, %d groups", err, d.Proven.whole)
	}
}

// The kernel writes an xfs's headers every second, so that no growth waits for half a minute.
func TestXFSWritesItsHeadersEverySecond(t *testing.T) {
	before, err := os.ReadFile(xfsSyncInterval)
	if err == nil {
		err = os.WriteFile(xfsSyncInterval, []byte("200"), 0)
	}
	if err != nil {
		t.Skipf("it changes a setting of the kernel's xfs: %v: run it as root, after modprobe xfs", err)
	}
	defer os.WriteFile(xfsSyncInterval, before, 0)
	xfs.BeforeMount()
	if got, err := os.ReadFile(xfsSyncInterval); err != nil || strings.TrimSpace(string(got)) != "100" {
		t.Errorf("%s\nwant 100 hundredths of a second\ngot  %q, error %v", xfsSyncInterval, got, err)
	}
}
