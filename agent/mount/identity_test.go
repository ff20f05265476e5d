package mount

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount/mounttest"
)

// topmost returns the identity of the topmost mount at a path, and the identity that a kernel
// before 6.8 would show.
func topmost(t *testing.T, path string) (now, old Identity) {
	t.Helper()
	m, err := Topmost(path)
	if err != nil || m == nil {
		t.Fatalf("%s: nothing is mounted there, error %v", path, err)
	}
	now = Identify(m)
	old = now
	old.Unique = 0
	return now, old
}

// A mount that was created earlier may be attached later, on top.
func TestTopmostIsTheMountThatWasPlacedLast(t *testing.T) {
	dir := mounttest.Own(t)
	config, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(config)
	if err := unix.FsconfigSetString(config, "source", "older"); err != nil {
		t.Fatal(err)
	}
	if err := unix.FsconfigCreate(config); err != nil {
		t.Fatal(err)
	}
	older, err := unix.Fsmount(config, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(older)
	mounttest.Mount(t, "newer", dir, "tmpfs", 0, "")
	if err := unix.MoveMount(older, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	top, err := Topmost(dir)
	if err != nil || top == nil || top.Source != "older" {
		t.Errorf("want older, on newer\ngot  %+v, error %v", top, err)
	}
}

// The next mount may reuse a mount's number. Each filesystem is mounted and unmounted until the
// number is reused, and the new mount must not be mistaken for the earlier one, on a kernel with
// unique mount numbers and on one without.
func TestReusedMountNumberIsAnotherMount(t *testing.T) {
	for _, fstype := range []string{"tmpfs", "ext3", "ext4", "xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			dir := mounttest.Own(t)
			source := "tmpfs"
			if fstype != "tmpfs" {
				source = mounttest.Attach(t, mounttest.Image(t, fstype))
			}
			mounttest.Mount(t, source, dir, fstype, 0, "")
			before, beforeOld := topmost(t, dir)
			mark := look(t, dir)
			reused := 0
			for range 60 {
				mounttest.Unmount(t, dir)
				mounttest.Mount(t, source, dir, fstype, 0, "")
				after, afterOld := topmost(t, dir)
				if after.ID != before.ID {
					continue
				}
				if before.Same(after) || beforeOld.Same(afterOld) || beforeOld.Same(after) {
					t.Fatalf("mount %d after another one with that number\nwas %+v\nis  %+v\nand taken for the same", after.ID, before, after)
				}
				if before.Bears(look(t, dir)) || after.Bears(mark) && mark.unique != 0 {
					t.Fatalf("the mark of mount %d is taken for that of another one", after.ID)
				}
				if fstype != "tmpfs" && beforeOld.Bears(Mark{id: after.ID}) {
					t.Fatalf("the number %d alone is taken for the mount before", after.ID)
				}
				if !before.Filesystem().Same(after) || !after.Bears(look(t, dir)) || !afterOld.Bears(Mark{id: after.ID}) {
					t.Fatalf("the mount there is not itself, or of another filesystem: %+v, %+v", before, after)
				}
				if reused++; reused == 3 {
					return
				}
			}
			if reused == 0 {
				t.Skip("no number came again, as others mount meanwhile: run it alone")
			}
		})
	}
}

func look(t *testing.T, dir string) Mark {
	t.Helper()
	mark, err := Look(dir)
	if err != nil {
		t.Fatal(err)
	}
	return mark
}

// btrfs makes up a number for each subvolume: neither the number of stat nor that of mountinfo is a
// disk's.
func TestBtrfsIsIdentifiedByItsDisks(t *testing.T) {
	dir := mounttest.Own(t)
	disk := mounttest.Attach(t, mounttest.Image(t, "btrfs"))
	mounttest.Mount(t, disk, dir, "btrfs", 0, "")
	var of, at unix.Stat_t
	if err := unix.Stat(disk, &of); err != nil {
		t.Fatal(err)
	}
	if err := unix.Stat(dir, &at); err != nil {
		t.Fatal(err)
	}
	got, _ := topmost(t, dir)
	if len(got.Devices) != 1 || got.Devices[0].Number != of.Rdev || got.Devices[0].Seq == 0 || got.Super == 0 {
		t.Errorf("want disk %d:%d\ngot  %+v", unix.Major(of.Rdev), unix.Minor(of.Rdev), got)
	}
	if at.Dev == of.Rdev || got.Number == of.Rdev || got.Number == at.Dev {
		t.Errorf("the numbers of stat (%d), mountinfo (%d) and the disk (%d) no longer differ: correct the comments about it", at.Dev, got.Number, of.Rdev)
	}
	file, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if has, err := got.Has(file); !has || err != nil {
		t.Errorf("want its file to be its own\ngot  %v, error %v", has, err)
	}
	if err := os.Mkdir(filepath.Join(dir, "folder"), 0o755); err != nil {
		t.Fatal(err)
	}
	bound := filepath.Join(dir, "bound")
	mounttest.Mount(t, filepath.Join(dir, "folder"), bound, "", unix.MS_BIND, "")
	if bind, _ := topmost(t, bound); bind.Same(got) || bind.Filesystem().Same(got) || bind.Root != "/folder" {
		t.Errorf("a folder of it is taken for it: %+v", bind)
	}
	file.Close()
}

// A clone has the UUID of its original, but is another disk.
func TestCloneOfAnXFSIsAnotherFilesystem(t *testing.T) {
	dir := mounttest.Own(t)
	image := mounttest.Image(t, "xfs")
	clone := filepath.Join(t.TempDir(), "clone.img")
	mounttest.Run(t, "cp", "--sparse=always", image, clone)
	original, copied := filepath.Join(dir, "original"), filepath.Join(dir, "copy")
	mounttest.Mount(t, mounttest.Attach(t, image), original, "xfs", 0, "")
	mounttest.Mount(t, mounttest.Attach(t, clone), copied, "xfs", 0, "nouuid")
	a, oldA := topmost(t, original)
	b, oldB := topmost(t, copied)
	a.UUID, b.UUID = "the same", "the same"
	if a.Same(b) || oldA.Same(oldB) || a.Filesystem().Same(b.Filesystem()) {
		t.Errorf("taken for one:\n%+v\n%+v", a, b)
	}
}

// The next disk in a place has the same name and number as the earlier disk.
func TestReusedDeviceNumberIsAnotherDisk(t *testing.T) {
	dir := mounttest.Own(t)
	image := mounttest.Image(t, "xfs")
	clone := filepath.Join(t.TempDir(), "clone.img")
	mounttest.Run(t, "cp", "--sparse=always", image, clone)
	disk := mounttest.Attach(t, image)
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	before, beforeOld := topmost(t, dir)
	mounttest.Unmount(t, dir)
	mounttest.Reattach(t, disk, clone)
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	after, afterOld := topmost(t, dir)
	if before.Devices[0].Number != after.Devices[0].Number {
		t.Fatal("the disk got another number: nothing was shown")
	}
	if before.Same(after) || beforeOld.Same(afterOld) || before.Filesystem().Same(after.Filesystem()) {
		t.Errorf("taken for one:\n%+v\n%+v", before, after)
	}
}

// A mount over another one has its own mark, and hides the other's.
func TestMarkIsOfTheTopmostMount(t *testing.T) {
	dir := mounttest.Own(t)
	if _, err := Look(dir); err != ErrNoMount {
		t.Errorf("a folder\nwant %v\ngot  %v", ErrNoMount, err)
	}
	if _, err := Look(dir + "/nothing"); err != ErrNotExist {
		t.Errorf("a missing path\nwant %v\ngot  %v", ErrNotExist, err)
	}
	mounttest.Mount(t, "below", dir, "tmpfs", 0, "")
	below, _ := topmost(t, dir)
	file, err := os.Create(dir + "/file")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	mounttest.Mount(t, "above", dir, "tmpfs", 0, "")
	above, _ := topmost(t, dir)
	if mark := look(t, dir); below.Bears(mark) || !above.Bears(mark) {
		t.Errorf("mark %+v\nof %+v\nnot of %+v", mark, above, below)
	}
	for identity, want := range map[*Identity]bool{&below: true, &above: false} {
		if has, err := identity.Has(file); has != want || err != nil {
			t.Errorf("a file below in %s\nwant %v\ngot  %v, error %v", identity.Source, want, has, err)
		}
	}
	file.Close()
	stack, err := At(dir)
	if err != nil || len(stack) != 2 || !Identify(stack[0]).Same(Identity{Source: "below", ID: below.ID, Unique: below.Unique}) {
		t.Errorf("the lower one: %+v, error %v", stack, err)
	}
}

// uniques has the number that statx returns, however many mounts there are in between.
func TestUniqueNumberIsStatx(t *testing.T) {
	dir := mounttest.Own(t)
	for i := range 2 * listStep { // more than one call of listmount returns
		mounttest.Mount(t, "many", filepath.Join(dir, string(rune('a'+i%26)), string(rune('a'+i/26))), "tmpfs", 0, "")
	}
	mounttest.Mount(t, "last", dir, "tmpfs", 0, "")
	mark := look(t, dir)
	if mark.unique == 0 {
		t.Skip("this kernel gives mounts no number for good: run it on Linux 6.8 or newer")
	}
	if m, err := Topmost(dir); err != nil || uniques()[m.ID] != mark.unique {
		t.Errorf("want %d\ngot  %d, error %v", mark.unique, uniques()[m.ID], err)
	}
	if got := uniques()[1<<30]; got != 0 {
		t.Errorf("a path without a mount\nwant 0\ngot  %d", got)
	}
}

func TestIdentityIsWrittenAndReadWhole(t *testing.T) {
	want := Identity{1<<63 + 1, 1<<62 + 1, 3, "xfs", "/", "uuid", 254 << 8, []Device{{254 << 8, 7}, {5, 0}}, "source", ""}
	text, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var got Identity
	if err := json.Unmarshal(text, &got); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%s\nwant %+v\ngot  %+v, error %v", text, want, got, err)
	}
}

// Same compares every field that is known on both sides, and no other.
func TestSameComparesTheFieldsKnownOnBothSides(t *testing.T) {
	whole := Identity{Unique: 1, Super: 2, ID: 3, FSType: "xfs", Root: "/", UUID: "u", Number: 4, Devices: []Device{{4, 5}, {6, 7}}, Source: "s"}
	for name, change := range map[string]func(*Identity){
		"unique": func(i *Identity) { i.Unique++ }, "super": func(i *Identity) { i.Super++ }, "id": func(i *Identity) { i.ID++ },
		"type": func(i *Identity) { i.FSType = "ext4" }, "root": func(i *Identity) { i.Root = "/sub" }, "uuid": func(i *Identity) { i.UUID = "v" },
		"number": func(i *Identity) { i.Number++ }, "source": func(i *Identity) { i.Source = "t" },
		"a disk's seq": func(i *Identity) { i.Devices = []Device{{4, 5}, {6, 8}} }, "a disk": func(i *Identity) { i.Devices = []Device{{4, 5}, {8, 7}} },
		"one disk more": func(i *Identity) { i.Devices = []Device{{4, 5}, {6, 7}, {8, 9}} }, "one disk less": func(i *Identity) { i.Devices = []Device{{4, 5}} },
	} {
		other := whole
		if change(&other); whole.Same(other) || other.Same(whole) {
			t.Errorf("%s: another one is taken for the same", name)
		}
	}
	for name, less := range map[string]Identity{
		"nothing": {}, "number": {Number: 4}, "disks without seq, in another order": {Devices: []Device{{6, 0}, {4, 0}}}, "root": {Root: "/"},
	} {
		if !whole.Same(less) || !less.Same(whole) {
			t.Errorf("%s known: not taken for the same", name)
		}
	}
}

// hangLimit ends a test that waits for an answer that never comes; the test has then failed.
const hangLimit = 5 * time.Second

// Identifying the mount of a server that does not answer, and a mount that it covers, needs only
// what the kernel has in memory.
func TestMountThatHangsIsIdentifiedAtOnce(t *testing.T) {
	dir := mounttest.Own(t)
	mounttest.Mount(t, "below", dir, "tmpfs", 0, "")
	release := mounttest.Hang(t, dir)
	stack, err := At(dir)
	if err != nil || len(stack) != 2 {
		t.Fatalf("want two mounts\ngot  %v, error %v", stack, err)
	}
	late := time.AfterFunc(hangLimit, release) // then all calls that wait for the server fail
	defer late.Stop()
	below, above, mark := Identify(stack[0]), Identify(stack[1]), look(t, dir)
	if !late.Stop() {
		t.Error("it waited for the server")
	}
	if below.Source != "below" || above.FSType != "fuse" || !above.Bears(mark) {
		t.Errorf("got %+v\nand %+v", below, above)
	}
}
