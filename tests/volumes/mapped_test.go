package volumes

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// secret is the key of the encrypted mappings, which nobody but the kernel may learn.
const secret = "5ca1ab1e00112233445566778899aabbccddeeff00112233445566778899aabb"

// mappedBytes is the size of the disks below mappings, and keptBytes is what a mapping leaves out
// at its disk's beginning, as cryptsetup does for the header of LUKS.
const mappedBytes, keptBytes = 96 * miB, 16 * miB

// mapper boots a guest with the device-mapper.
func mapper(t *testing.T) *vm.Guest { return mapperWith(t, "") }

// mapperWith is mapper with more on the kernel's command line.
func mapperWith(t *testing.T, commandLine string) *vm.Guest {
	t.Helper()
	return vmtest.Boot(t, vm.Options{Image: vmtest.Image(t, []string{"dm-mod", "dm-crypt", "xts", "ecb", "algif_skcipher"}), Append: commandLine})
}

// run runs a program of the host in the guest, and returns its output.
func run(t *testing.T, g *vm.Guest, program string, arguments ...string) string {
	t.Helper()
	output, err := g.Run(within(t, jobLimit), program, arguments...)
	must(t, err)
	return output
}

func dmsetup(t *testing.T, g *vm.Guest, arguments ...string) string {
	t.Helper()
	return run(t, g, "/usr/sbin/dmsetup", arguments...)
}

// node returns a mapping's node, which devtmpfs makes.
func node(t *testing.T, g *vm.Guest, name string) string {
	t.Helper()
	return "/dev/dm-" + strings.TrimSpace(dmsetup(t, g, "info", "-c", "--noheadings", "-o", "minor", name))
}

// mapped attaches a disk and makes a mapping of it, and on that an ext4 that is mounted by the
// test, not by the agent. table gets the disk's node and the length in sectors that the mapping has
// if it reaches to the disk's end.
func mapped(t *testing.T, g *vm.Guest, name, table string) *vm.Volume {
	t.Helper()
	v, disk := bareDisk(t, g, name)
	dmsetup(t, g, "create", name, "--table", fmt.Sprintf(table, (mappedBytes-keptBytes)/sectorBytes, disk, keptBytes/sectorBytes))
	formatted(t, g, v, node(t, g, name))
	return v
}

// bareDisk attaches a disk without a filesystem, and returns its node in the guest.
func bareDisk(t *testing.T, g *vm.Guest, name string) (*vm.Volume, string) {
	t.Helper()
	v, err := g.Volume(limited(t), name, "ext4", mappedBytes)
	must(t, err)
	must(t, g.Attach(limited(t), v.Volume))
	disk, err := g.DeviceOf(limited(t), v.DiskID())
	must(t, err)
	return v, disk
}

// formatted makes an ext4 on a device of the guest and mounts it.
func formatted(t *testing.T, g *vm.Guest, v *vm.Volume, device string) {
	t.Helper()
	run(t, g, "/usr/sbin/mkfs.ext4", "-q", "-F", "-b", "4096", device)
	v.GuestPath = "/run/test/" + v.ID
	must(t, g.Remote.Mkdir(limited(t), v.GuestPath, 0o755))
	must(t, g.Remote.Mount(limited(t), remote.Mount{Source: device, Target: v.GuestPath, FSType: "ext4"}))
}

// table returns a mapping's active table, and checks that the mapping is not suspended.
func table(t *testing.T, g *vm.Guest, name string) string {
	t.Helper()
	if state := dmsetup(t, g, "info", "-c", "--noheadings", "-o", "suspended", name); !strings.Contains(state, "Active") {
		t.Errorf("%s is %s", name, state)
	}
	return strings.TrimSpace(dmsetup(t, g, "table", "--showkeys", name))
}

// end4 returns where the ext4 on a device ends, by its superblock on the device.
func end4(t *testing.T, g *vm.Guest, device string) uint64 {
	t.Helper()
	end, err := vm.FilesystemSize("ext4", remoteReader{limited(t), g, device})
	must(t, err)
	return end
}

// remoteReader reads a file of the guest.
type remoteReader struct {
	ctx  context.Context
	g    *vm.Guest
	path string
}

func (r remoteReader) ReadAt(p []byte, offset int64) (int, error) {
	b, err := r.g.Remote.ReadAt(r.ctx, r.path, offset, len(p))
	return copy(p, b), err
}

// The host knows the disk's size and not the mappings in the guest. So the size that it asks for is
// the disk's, and the filesystem ends where the mappings do.
//
//	ext4 ─ linear ─────────── disk
//	ext4 ─ crypt ──────────── disk
//	ext4 ─ crypt ─ linear ─── disk
func TestVolumeOnAMappingGrowsWithItsDisk(t *testing.T) {
	g := mapper(t)
	const goal = mappedBytes + 64*miB
	line := map[string]string{"linear": "0 %d linear %s %d", "crypt": "0 %d crypt aes-xts-plain64 " + secret + " 0 %s %d 1 allow_discards"}
	for _, name := range []string{"linear", "crypt", "both"} {
		t.Run(name, func(t *testing.T) {
			var v *vm.Volume
			names, usable := []string{name}, uint64(goal-keptBytes)
			if name == "both" {
				names, usable = []string{"lower", "both"}, usable-miB
				var disk string
				v, disk = bareDisk(t, g, name)
				dmsetup(t, g, "create", "lower", "--table", fmt.Sprintf(line["linear"], (mappedBytes-keptBytes)/sectorBytes, disk, keptBytes/sectorBytes))
				dmsetup(t, g, "create", "both", "--table", fmt.Sprintf(line["crypt"], (mappedBytes-keptBytes-miB)/sectorBytes, node(t, g, "lower"), miB/sectorBytes))
				formatted(t, g, v, node(t, g, "both"))
			} else {
				v = mapped(t, g, name, line[name])
			}
			writer := written(t, v, 24*miB)
			must(t, g.Agent().CheckResizeVolume(limited(t), v.GuestPath, goal))
			must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
			before := table(t, g, name)
			for range 2 {
				must(t, resize(t, g, v, goal))
			}
			must(t, resize(t, g, v, 0))
			if got := sizes(t, v).DeviceBytes; got != usable {
				t.Errorf("the mapping above a disk of %d bytes\nwant %d\ngot  %d", goal, usable, got)
			}
			if got := end4(t, g, node(t, g, name)); got != usable {
				t.Errorf("the filesystem's end\nwant %d\ngot  %d", usable, got)
			}
			was := strings.Fields(before)
			was[1] = fmt.Sprint(usable / sectorBytes)
			if got, want := table(t, g, name), strings.Join(was, " "); got != want {
				t.Errorf("the table\nwant %s\ngot  %s", want, got)
			}
			<-writer.Done()
			must(t, g.Remote.Unmount(limited(t), v.GuestPath, 0))
			run(t, g, "/usr/sbin/e2fsck", "-fn", node(t, g, name))
			must(t, g.Remote.Mount(limited(t), remote.Mount{Source: node(t, g, name), Target: v.GuestPath, FSType: "ext4"}))
			if got, err := v.Verify(within(t, jobLimit), nil); err != nil || got != writer.Ledger().Bytes() {
				t.Errorf("bytes acknowledged and equal\nwant %d\ngot  %d, %v", writer.Ledger().Bytes(), got, err)
			}
			for _, one := range names {
				table(t, g, one)
			}
		})
	}
}

// The header of LUKS is 16 MiB. With the key in the kernel's table the agent grows the mapping, and
// the next opening makes it as long. With the key in a keyring it cannot, and names the command
// that does.
func TestVolumeOnLUKSGrowsIfItsKeyIsInTheKernel(t *testing.T) {
	g := mapper(t)
	const goal, key = mappedBytes + 64*miB, "/run/test-key"
	must(t, g.Remote.WriteFile(limited(t), key, []byte(secret)))
	cryptsetup := func(arguments ...string) {
		t.Helper()
		run(t, g, "/usr/sbin/cryptsetup", append(arguments, "--batch-mode", "--key-file", key)...)
	}
	for name, options := range map[string][]string{"kernel": {"--disable-keyring"}, "keyring": nil} {
		t.Run(name, func(t *testing.T) {
			v, disk := bareDisk(t, g, name)
			cryptsetup("luksFormat", "--type", "luks2", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", disk)
			open := append([]string{"open", disk, name}, options...)
			cryptsetup(open...)
			formatted(t, g, v, node(t, g, name))
			must(t, v.Touch(limited(t)))
			if name == "keyring" {
				before := table(t, g, name)
				refused(t, g.Agent().CheckResizeVolume(limited(t), v.GuestPath, goal), codes.FailedPrecondition, `cryptsetup resize "keyring"`)
				if got := table(t, g, name); got != before {
					t.Errorf("the table\nwant %s\ngot  %s", before, got)
				}
				must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
				cryptsetup("resize", name)
			}
			must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
			must(t, resize(t, g, v, goal))
			if got := end4(t, g, node(t, g, name)); got != goal-keptBytes {
				t.Errorf("the filesystem's end\nwant %d\ngot  %d", goal-keptBytes, got)
			}
			must(t, g.Remote.Unmount(limited(t), v.GuestPath, 0))
			run(t, g, "/usr/sbin/cryptsetup", "close", name)
			cryptsetup(open...)
			if got := sizeOf(t, g, node(t, g, name)); got != goal-keptBytes {
				t.Errorf("opened again\nwant %d bytes\ngot  %d", goal-keptBytes, got)
			}
			must(t, g.Remote.Mount(limited(t), remote.Mount{Source: node(t, g, name), Target: v.GuestPath, FSType: "ext4"}))
			must(t, v.Touch(limited(t)))
		})
	}
}

func sizeOf(t *testing.T, g *vm.Guest, device string) uint64 {
	t.Helper()
	size, err := g.Remote.DeviceSize(limited(t), device)
	must(t, err)
	return size
}

// A mapping that the agent cannot grow is refused before the disk grows, with the command that
// grows it, and stays as it was.
func TestMappingThatCannotGrowIsRefusedAndUnchanged(t *testing.T) {
	g := mapper(t)
	const goal = mappedBytes + 64*miB
	refusedAsIs := func(t *testing.T, v *vm.Volume, says ...string) {
		t.Helper()
		refused(t, g.Agent().CheckResizeVolume(limited(t), v.GuestPath, goal), codes.FailedPrecondition, says...)
		must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
		refused(t, resize(t, g, v, goal), codes.FailedPrecondition, says...)
	}
	staysAsIs := func(t *testing.T, v *vm.Volume, name string, says ...string) {
		t.Helper()
		before := table(t, g, name)
		refusedAsIs(t, v, says...)
		must(t, resize(t, g, v, 0)) // the filesystem ends with the mapping
		if got := table(t, g, name); got != before {
			t.Errorf("the table\nwant %s\ngot  %s", before, got)
		}
	}
	t.Run("stripes", func(t *testing.T) {
		v := mapped(t, g, "stripes", "0 %d striped 1 128 %s %d")
		staysAsIs(t, v, "stripes", "/dev/dm-", `"stripes"`, "striped", "dmsetup")
		dmsetup(t, g, "load", "stripes", "--table", strings.Replace(table(t, g, "stripes"), fmt.Sprint((mappedBytes-keptBytes)/sectorBytes), fmt.Sprint((goal-keptBytes)/sectorBytes), 1))
		dmsetup(t, g, "resume", "stripes")
		for range 2 {
			must(t, resize(t, g, v, 0)) // as the error says
		}
		if got := end4(t, g, node(t, g, "stripes")); got != goal-keptBytes {
			t.Errorf("the filesystem's end\nwant %d\ngot  %d", goal-keptBytes, got)
		}
	})
	t.Run("another mapping on the disk", func(t *testing.T) {
		v := mapped(t, g, "first", "0 %d linear %s %d")
		disk, err := g.DeviceOf(limited(t), v.DiskID())
		must(t, err)
		dmsetup(t, g, "create", "second", "--table", fmt.Sprintf("0 8 linear %s 0", disk))
		staysAsIs(t, v, "first", disk, "lvextend")
		dmsetup(t, g, "remove", "second")
		must(t, resize(t, g, v, goal))
	})
	t.Run("a mapping of a partition", func(t *testing.T) {
		v := mapped(t, g, "kpartx", "0 %d linear %s %d")
		node := node(t, g, "kpartx")
		must(t, g.Remote.Unmount(limited(t), v.GuestPath, 0))
		dmsetup(t, g, "rename", "kpartx", "--setuuid", "part1-devnode_254:0_")
		must(t, g.Remote.Mount(limited(t), remote.Mount{Source: node, Target: v.GuestPath, FSType: "ext4"}))
		staysAsIs(t, v, "kpartx", `"kpartx"`, "partition", "growpart")
	})
	t.Run("suspended by somebody else", func(t *testing.T) {
		v := mapped(t, g, "asleep", "0 %d linear %s %d")
		dmsetup(t, g, "suspend", "asleep")
		refusedAsIs(t, v, `dmsetup resume "asleep"`)
		refused(t, resize(t, g, v, 0), codes.FailedPrecondition, `dmsetup resume "asleep"`)
		dmsetup(t, g, "resume", "asleep")
		must(t, resize(t, g, v, goal))
		table(t, g, "asleep")
	})
}

// An agent is killed between two of its steps. Neither leaves the mapping suspended, and the same
// call reaches the size.
func TestGrowthOfAMappingThatWasCutGoesOn(t *testing.T) {
	g := mapper(t)
	const goal, sectors = mappedBytes + 64*miB, (mappedBytes + 64*miB - keptBytes) / sectorBytes
	for _, c := range []struct {
		name    string
		sectors int
		resumed bool
	}{
		{"with a table beside the active one, which the next call replaces", 8, false},
		{"between the table and the filesystem", sectors, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := fmt.Sprint("cut", c.resumed)
			v := mapped(t, g, name, "0 %d linear %s %d")
			disk, err := g.DeviceOf(limited(t), v.DiskID())
			must(t, err)
			must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
			dmsetup(t, g, "load", name, "--table", fmt.Sprintf("0 %d linear %s %d", c.sectors, disk, keptBytes/sectorBytes))
			if c.resumed {
				dmsetup(t, g, "resume", name)
			}
			must(t, resize(t, g, v, goal))
			reaches(t, g, name, goal-keptBytes)
		})
	}
}

// reaches fails unless a linear mapping and the filesystem on it end at bytes.
func reaches(t *testing.T, g *vm.Guest, name string, bytes uint64) {
	t.Helper()
	want := fmt.Sprintf("0 %d linear ", bytes/sectorBytes)
	if got := table(t, g, name); !strings.HasPrefix(got, want) || !strings.HasSuffix(got, fmt.Sprintf(" %d", keptBytes/sectorBytes)) {
		t.Errorf("the table\nwant %s…\ngot  %s", want, got)
	}
	if got := end4(t, g, node(t, g, name)); got != bytes {
		t.Errorf("the filesystem's end\nwant %d\ngot  %d", bytes, got)
	}
}

// The agent is killed while the kernel swaps the tables: the disk hangs, and the swap waits for the
// requests in flight. The mapping must not stay suspended, because nobody would resume it: then
// every request would wait for ever.
func TestMappingRunsAfterAKillInTheSwapOfItsTables(t *testing.T) {
	g := mapperWith(t, remote.AsService)
	v := mapped(t, g, "swapped", "0 %d linear %s %d")
	writer := written(t, v, 0)
	goal := uint64(mappedBytes)
	for swaps := false; !swaps; {
		becomes(t, v, nothing)
		goal += 32 * miB // also again: a call that was not done in time goes on when the disk answers
		must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
		must(t, v.Serve(limited(t)))
		if swaps = swapping(t, g, v, goal); !swaps {
			must(t, v.Heal(limited(t)))
		}
	}
	ids, err := g.Remote.Signal(limited(t), remote.Agent, syscall.SIGKILL)
	must(t, err)
	must(t, v.Answer()) // a killed thread that waits for the disk ends when it answers
	vmtest.AwaitEnds(t, g, ids)
	table(t, g, "swapped")
	must(t, writer.Await(within(t, jobLimit), writer.Ledger().Bytes()+miB))
	must(t, resize(t, g, v, goal))
	reaches(t, g, "swapped", goal-keptBytes)
	must(t, writer.Stop(limited(t)))
	must(t, writer.Err())
}

// swapping makes the disk hang and asks for a growth. It returns true when a thread of the agent
// waits in the kernel for the requests of a mapping, and false if the call has not come that far,
// because a look at the volume waits for the disk.
func swapping(t *testing.T, g *vm.Guest, v *vm.Volume, goal uint64) bool {
	t.Helper()
	must(t, v.Hang(limited(t)))
	answered := make(chan error, 1)
	go func() { answered <- g.Agent().ResizeVolume(limited(t), v.GuestPath, goal) }() // it may be repeated after the kill
	again := time.NewTicker(20 * time.Millisecond)                                    // no event tells the host
	defer again.Stop()
	for ctx := within(t, jobLimit); ; {
		threads, err := g.Remote.Threads(ctx, remote.Agent)
		must(t, err)
		if slices.ContainsFunc(threads.Stacks, func(s string) bool { return strings.Contains(s, "dm_suspend") }) {
			return true
		}
		select {
		case <-answered:
			return false
		case <-again.C:
		}
	}
}

// The kernel's log names the disk and not the mapping. A read that fails is reported for the volume
// if the mapping has its sector, and so is a disk that ends before the filesystem above it.
func TestFaultOfTheDiskBelowAMappingIsReported(t *testing.T) {
	g := mapper(t)
	v := mapped(t, g, "below", "0 %d linear %s %d")
	becomes(t, v, nothing)
	failOneRead(t, g, v)
	for _, step := range []struct {
		bytes uint64
		says  func([]*volumepb.Condition) bool
	}{{mappedBytes / 2, isTooSmall}, {mappedBytes, wasTooSmall}} {
		must(t, g.VM().QMP().Execute(limited(t), "block_resize", map[string]any{"node-name": qemu.RawNode(v.DiskID()), "size": step.bytes}, nil))
		becomes(t, v, step.says)
		refused(t, resize(t, g, v, 0), codes.FailedPrecondition, v.GuestPath)
	}
	pull(t, g, v)
	becomes(t, v, isGone)
	refused(t, resize(t, g, v, 0), codes.FailedPrecondition, v.GuestPath)
	must(t, g.Remote.Unmount(limited(t), v.GuestPath, unix.MNT_DETACH))
}
