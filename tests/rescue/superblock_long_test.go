//go:build long

package rescue

import (
	"os"
	"strings"
	"testing"

	"github.com/directvol/directvol/host/rescue"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// grownThrice are the sizes of three growths; see grownOnce.
var grownThrice = []uint64{420 * miB, 600 * miB, 900 * miB}

// A volume with several growths is refused by the newer kernel, too.
func TestVolumeThatGrewThreeTimesBeforeTheCutIsRescuedWhole(t *testing.T) {
	c := refusedVolume(t, 2, func() cut { return cutOff(t, grownThrice) })
	unproven(t, c.copied(t))
	isToldItsSize(t, c)
}

// The same with one growth, if the disk has a directory that leads into the new space, and the
// superblock without that space.
func TestVolumeWhoseDirectoryLeadsBeyondItsEndIsRescuedWhole(t *testing.T) {
	isToldItsSize(t, refusedVolume(t, 2, func() cut { return cutBehindDirectory(t) }))
}

// isToldItsSize runs rescue on a volume that is refused until its superblock has the new size.
func isToldItsSize(t *testing.T, c cut) {
	t.Helper()
	report, said, exit := run(t, vmtest.Within(t, vmtest.JobLimit), c.Path)
	if exit != 0 || !report.Mounted || report.Recovered != rescue.RecoveredYes || report.Error != "" {
		t.Fatalf("rescue\nwant exit 0, an xfs whose log was recovered\ngot  exit %d, %+v\n%s", exit, report, said)
	}
	s := report.Superblock
	if s == nil || s.FromBytes != diskBytes || s.ToBytes != c.bytes || s.WroteBytes <= diskBytes || s.WroteBytes > c.bytes || s.PutBack || report.Attempts < 2 {
		t.Fatalf("its superblock\nwant %d bytes, refused, and then more to begin with, up to %d\ngot  %d attempts, %+v", diskBytes, c.bytes, report.Attempts, s)
	}
	vmtest.Must(t, report.Fsck.Err("xfs"))
	t.Logf("%s%+v", said, *s)
	isWhole(t, c, nil)
}

// unproven damages the proof that the volume has grown. The newer kernel then refuses the volume,
// rescue does not write the superblock, and it says which steps remain and what they cost.
func unproven(t *testing.T, c cut) {
	t.Helper()
	f, err := os.OpenFile(c.Path, os.O_WRONLY, 0)
	vmtest.Must(t, err)
	defer f.Close()
	for group := int64(1); group < diskBytes/groupBytes; group++ {
		_, err := f.WriteAt([]byte{0}, group*groupBytes)
		vmtest.Must(t, err)
	}
	vmtest.Must(t, f.Close())
	report, said, exit := run(t, vmtest.Within(t, vmtest.JobLimit), c.Path)
	if exit != 1 || report.Mounted || report.Recovered != rescue.RecoveredUnknown || report.Fsck != nil || report.Attempts != 1 || report.Superblock != nil {
		t.Errorf("rescue without proof of a growth\nwant exit 1, refused once, nothing written\ngot  exit %d, %+v\n%s", exit, report, said)
	}
	for _, words := range []string{"mount refused by this kernel too", "structure needs cleaning", "out of range, EOFS", "nothing proves that it was grown",
		"copy the whole disk first", "files that fsync had acknowledged"} {
		if !strings.Contains(report.Error, words) {
			t.Errorf("\nwant it to say %q\ngot  %s", words, report.Error)
		}
	}
	t.Log(report.Error)
}
