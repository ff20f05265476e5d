package experiments

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// manyVolumes is the number of volumes in the guest that has many. Its machine has nine PCI
	// bridges, of 30 disks each, so that each volume has a disk of its own.
	manyVolumes, manyBridges = 256, 9
	// manyDiskBytes is the size of each disk, for 256 of which a tmpfs has room.
	manyDiskBytes = 16 << 20
	// manySetUp is a base for vm.Limit: 255 disks are attached and mounted one after the other.
	manySetUp = 3 * time.Minute
	// manyMounts is the number of attachments in one run, in each of the two guests.
	manyMounts = 4
)

// The guest with one volume and the guest with many run in turn: the other one's processors stand
// still meanwhile, so that it takes no time from the one that is measured.
var many = experiment{
	name:  fmt.Sprintf("a guest with %d volumes, and a guest with one", manyVolumes),
	setUp: manySetUp,
	lines: []measure.Line{
		{Name: "volume_stats_rtt_256", Unit: "µs", Baseline: "volume_stats_rtt_1", Goal: measure.AtMost(1.2),
			What: fmt.Sprintf("GetVolumeStats of each of %d ext4 volumes in turn, all mounted, watched, healthy and asked about shortly before, while nobody else calls: a volume that nobody asks about is examined first", manyVolumes)},
		{Name: "volume_stats_rtt_1", Unit: "µs", What: "the same in a guest with one volume"},
		{Name: "mount_256", Unit: "ms", Baseline: "mount_1", Goal: measure.AtMost(1.3),
			What: fmt.Sprintf("attach and mount an ext4 volume in a guest that has %d others, each on a disk of its own behind %d PCI bridges, until the agent answers that it is mounted; without the agent this slows down, too: see mount_256_bare and mount_256_of_bare", manyVolumes-1, manyBridges)},
		{Name: "mount_1", Unit: "ms", What: "the same in a guest of the same machine that has no volume"},
		{Name: "mount_256_bare", Unit: "ms", Baseline: "mount_1_bare", What: "the same without the agent: attach, wait until the guest has the disk, mount(2)"},
		{Name: "mount_1_bare", Unit: "ms", What: "the same in the guest that has no volume"},
		{Name: "mount_256_of_bare", Unit: "times", Baseline: "mount_1_of_bare", Goal: measure.AtMost(1.3),
			What: "mount_256 divided by mount_256_bare of the same round: QEMU and the kernel slow down with the number of disks, and the ratio shows what the agent adds to that"},
		{Name: "mount_1_of_bare", Unit: "times", What: "mount_1 divided by mount_1_bare"},
		{Name: "mount_256_qmp", Unit: "ms", Baseline: "mount_1_qmp", What: "QMP's part of it: until device_add is answered"},
		{Name: "mount_1_qmp", Unit: "ms", What: "the same in the guest that has no volume"},
		{Name: "mount_256_again", Unit: "ms", Baseline: "mount_1_again", What: "the agent's part of it: the same call for a device that the guest has already"},
		{Name: "mount_1_again", Unit: "ms", What: "the same in the guest that has no volume"},
		{Name: "mount_256_by_hand", Unit: "ms", Baseline: "mount_1_by_hand", What: "the kernel's part of that: mount(2) alone"},
		{Name: "mount_1_by_hand", Unit: "ms", What: "the same in the guest that has no volume"},
	},
	open: func(ctx context.Context, l *Setup, _ int) (s measure.Session, err error) {
		var both crowds
		defer func() {
			if err != nil {
				err = errors.Join(err, both.close(ctx))
			}
		}()
		for _, volumes := range []int{0, manyVolumes - 1} {
			c, err := l.openCrowd(ctx, volumes)
			if err != nil {
				return measure.Session{}, err
			}
			both = append(both, c)
		}
		return measure.Session{Run: both.run, Close: both.close}, nil
	},
}

// crowd is a guest with a number of volumes, and one disk that is attached and detached.
type crowd struct {
	stats, mount string // the rows
	guest        *vm.Guest
	disk         *disk
	paths        []string // of the volumes that stay mounted
}

// crowds are the guests of the experiment. All of them stand still but the one that is measured.
type crowds []*crowd

// openCrowd boots a guest and mounts volumes in it. The guest stands still afterwards.
func (l *Setup) openCrowd(ctx context.Context, volumes int) (*crowd, error) {
	c := &crowd{stats: "volume_stats_rtt_1", mount: "mount_1"}
	if volumes > 0 {
		c.stats, c.mount = "volume_stats_rtt_256", "mount_256"
	}
	var err error
	if c.guest, err = vm.Boot(ctx, vm.Options{Log: l.log, Append: patient, Bridges: manyBridges}); err != nil {
		return nil, err
	}
	if c.paths, err = l.mountMany(ctx, c.guest, volumes); err == nil {
		c.disk, err = l.newDisk(ctx, c.guest, "another", "ext4", manyDiskBytes)
	}
	if err == nil {
		err = c.standStill(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, crowds{c}.close(ctx))
	}
	return c, nil
}

// mountMany attaches and mounts volumes of a guest, and returns their paths. It waits for the first
// examination of each. Their images end with the setup's folder.
func (l *Setup) mountMany(ctx context.Context, guest *vm.Guest, volumes int) (paths []string, err error) {
	for i := range volumes {
		image, err := vm.Scratch(ctx, l.memory, "ext4", manyDiskBytes)
		if err != nil {
			return nil, err
		}
		v := guest.Take(sandbox.Volume{ID: fmt.Sprintf("many-%03d", i), Path: image, FSType: "ext4"})
		if err := v.Mount(ctx); err != nil {
			return nil, fmt.Errorf("volume %d of %d: %w", i+1, volumes, err)
		}
		if _, err := v.LookedStats(ctx); err != nil {
			return nil, err
		}
		paths = append(paths, v.GuestPath)
	}
	return paths, nil
}

// standStill and goOn stop and start the guest's processors (QMP's stop and cont).
func (c *crowd) standStill(ctx context.Context) error {
	return c.guest.VM().QMP().Execute(ctx, "stop", nil, nil)
}

func (c *crowd) goOn(ctx context.Context) error {
	return c.guest.VM().QMP().Execute(ctx, "cont", nil, nil)
}

// run measures both guests, and turns their order around for the next run, so that a drift of the
// machine cancels out.
func (all crowds) run(ctx context.Context, say func(string)) (measure.Trial, error) {
	defer slices.Reverse(all)
	t := measure.Trial{}
	for i := range 2 * manyMounts {
		c := all[i%len(all)]
		say(fmt.Sprintf("%s, %d of %d", c.mount, i/len(all)+1, manyMounts))
		if err := c.alone(ctx, func() error { return c.mountOnce(ctx, t) }); err != nil {
			return nil, err
		}
	}
	for i := range 2 * len(all) {
		c := all[min(i, 2*len(all)-1-i)] // one, other, other, one
		say(c.stats)
		if err := c.alone(ctx, func() error { return c.measureStats(ctx, t) }); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// alone calls do while the guest runs.
func (c *crowd) alone(ctx context.Context, do func() error) error {
	if err := c.goOn(ctx); err != nil {
		return err
	}
	return errors.Join(do(), c.standStill(ctx))
}

// mountOnce attaches and mounts the disk, by the agent and without it, and detaches it again.
// Detaching is not measured. What the guest had to do while it stood still is done first.
func (c *crowd) mountOnce(ctx context.Context, t measure.Trial) error {
	if err := pass(ctx, quietAfter); err != nil {
		return err
	}
	attached, err := timed(func() error { return c.disk.attach(ctx) })
	var mounted, bare time.Duration
	if err == nil {
		mounted, err = timed(func() error { return c.disk.mount(ctx) })
	}
	var device string
	if err == nil {
		device, err = c.guest.MountedDevice(ctx, c.disk.GuestPath)
	}
	if err == nil {
		err = c.mountAgain(ctx, device, t)
	}
	if err = errors.Join(err, c.guest.Detach(ctx, c.disk.ID)); err == nil {
		bare, err = c.mountBare(ctx, device)
	}
	if err != nil {
		return err
	}
	t[c.mount+"_qmp"] = append(t[c.mount+"_qmp"], milliseconds(attached))
	t[c.mount] = append(t[c.mount], milliseconds(attached+mounted))
	t[c.mount+"_bare"] = append(t[c.mount+"_bare"], milliseconds(bare))
	t[c.mount+"_of_bare"] = append(t[c.mount+"_of_bare"], float64(attached+mounted)/float64(bare))
	return nil
}

// mountBare attaches the disk and mounts it by hand, and detaches it again. device is the one that
// the guest gave the disk the last time: the guest reuses the name, which no other disk has now.
func (c *crowd) mountBare(ctx context.Context, device string) (took time.Duration, err error) {
	if err := pass(ctx, quietAfter); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.guest.Detach(ctx, c.disk.ID)) }()
	took, err = timed(func() error {
		if err := c.disk.attach(ctx); err != nil {
			return err
		}
		err := vm.Again(ctx, func() (bool, error) {
			serial, err := c.guest.Remote.ReadFile(ctx, "/sys/block/"+path.Base(device)+"/serial")
			if err != nil || strings.TrimSpace(string(serial)) != sandbox.DiskID(c.disk.ID) {
				return false, nil
			}
			_, err = c.guest.Remote.DeviceSize(ctx, device) // it can be opened a moment later
			return err == nil, nil
		})
		if err != nil {
			return err
		}
		return c.mountByHand(ctx, device)
	})
	if err != nil {
		return 0, err
	}
	return took, c.guest.Remote.Unmount(ctx, byHandPath, 0)
}

func (c *crowd) mountByHand(ctx context.Context, device string) error {
	return c.guest.Remote.Mount(ctx, remote.Mount{Source: device, Target: byHandPath, FSType: "ext4"})
}

// mountAgain mounts the disk that the guest has by hand, and then by the agent.
func (c *crowd) mountAgain(ctx context.Context, device string, t measure.Trial) error {
	if err := errors.Join(c.guest.Unmount(ctx, c.disk.ID), c.guest.Remote.Mkdir(ctx, byHandPath, 0o755)); err != nil {
		return err
	}
	byHand, err := timed(func() error { return c.mountByHand(ctx, device) })
	if err != nil {
		return err
	}
	if err := c.guest.Remote.Unmount(ctx, byHandPath, 0); err != nil {
		return err
	}
	again, err := timed(func() error { return c.disk.mount(ctx) })
	t[c.mount+"_again"] = append(t[c.mount+"_again"], milliseconds(again))
	t[c.mount+"_by_hand"] = append(t[c.mount+"_by_hand"], milliseconds(byHand))
	return err
}

// measureStats asks for the statistics of all volumes in turn, with the last one attached and
// mounted. It asks once more than it measures, because the agent examines each volume before it
// answers the first question after a long time.
func (c *crowd) measureStats(ctx context.Context, t measure.Trial) (err error) {
	if err := errors.Join(c.disk.attach(ctx), c.disk.mount(ctx)); err != nil {
		return errors.Join(err, c.guest.Detach(ctx, c.disk.ID))
	}
	defer func() { err = errors.Join(err, c.guest.Detach(ctx, c.disk.ID)) }()
	paths := append(slices.Clip(c.paths), c.disk.GuestPath)
	to, err := agentAddress(c.guest)
	if err != nil {
		return err
	}
	client, err := agentclient.Dial(ctx, to, agentclient.Config{})
	if err != nil {
		return err
	}
	defer client.Close()
	for _, path := range paths {
		if _, err := client.GetVolumeStats(ctx, path); err != nil {
			return err
		}
	}
	next := 0
	block, err := quietBlock(func() error {
		_, err := client.GetVolumeStats(ctx, paths[next%len(paths)])
		next++
		return err
	}, rounds/2)
	t[c.stats] = append(t[c.stats], block...)
	return err
}

func (all crowds) close(context.Context) (err error) {
	for _, c := range all {
		c.guest.Kill()
		err = errors.Join(err, c.guest.Close())
	}
	return err
}
