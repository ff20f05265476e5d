//go:build long

package soak

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/ttrpc"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

const (
	miB = 1 << 20
	giB = 1 << 30
	// firstBytes is the size of a new volume.
	firstBytes = giB
)

// duration is how long the volumes are under load.
var duration = flag.Duration("duration", time.Hour, "how long the volumes are under load")

// patientAgent makes the agent wait longer for a disk, and for its size, than by default: the guest
// is busy.
const patientAgent = "agent.hotplug_timeout=60 agent.directvol.resize_wait=60s"

// volume is a volume under load.
type volume struct {
	*vm.Volume
	name   string
	mapped bool // a device-mapper target is between the filesystem and the disk
	// Only the goroutine that grows the volume changes these:
	size    uint64 // after the last growth that succeeded
	goal    uint64 // of the next growth
	growths int
	// Only the goroutine of the writer changes these:
	ledger *remote.Ledger // of its last file
	rounds int            // how often fio has written its file and verified it
}

// soak is a guest with its volumes, and all that is known of them.
type soak struct {
	*record
	guest   *vm.Guest
	client  *agentclient.Client
	plain   *ttrpc.Client // for calls that client does not have
	fio     []string      // the first words of its command line
	volumes []*volume
}

// Nothing is wrong with these volumes, so no examination, however busy the guest, may find a
// condition. The last volume's filesystem was mounted by the test and is below a mapping.
//
//	ext4, ext3, xfs, btrfs ─── disk
//	ext4 ─ linear ──────────── disk
func TestHealthyVolumeHasNoConditionUnderFullLoad(t *testing.T) {
	s := newSoak(t)
	watchEnds := s.watch(t)
	ctx, cancel := context.WithTimeout(t.Context(), *duration)
	defer cancel()
	var loops sync.WaitGroup
	for _, v := range s.volumes {
		for _, loop := range []func(context.Context, *volume){s.load, s.verify, s.write, s.grow, s.ask} {
			loops.Go(func() { loop(ctx, v) })
		}
	}
	loops.Go(func() { s.freeze(ctx) })
	loops.Go(func() { s.trim(ctx) })
	loops.Go(func() { every(ctx, time.Minute, func() { t.Logf("%v:\n%s", s.elapsed(), s) }) })
	loops.Wait()
	t.Logf("after %v of load:\n%s", *duration, s)
	for _, v := range s.volumes {
		s.isIntact(t, v)
	}
	watchEnds()
	for _, v := range s.volumes {
		s.detach(t, v)
	}
	if given, asked := s.counts[late], s.counts["statistics"]; given > asked/100+1 {
		t.Errorf("calls that were not answered in time, beside %d questions\nwant 1 %% at most\ngot  %d", asked, given)
	}
	for _, wrong := range s.wrongs {
		t.Error(wrong)
	}
}

// newSoak boots the guest, brings fio into it and mounts the volumes.
func newSoak(t *testing.T) *soak {
	t.Helper()
	g := vmtest.Boot(t, vm.Options{Image: vmtest.Image(t, []string{"dm-mod"}), Append: patientAgent})
	s := &soak{record: newRecord(t, g), guest: g}
	to, err := address.Parse(g.VM().AgentAddress())
	vmtest.Must(t, err)
	s.client = agentclient.New(to, agentclient.Config{Vsock: g.VM()})
	t.Cleanup(func() { s.client.Close() })
	s.plain, err = s.dial(t.Context())
	vmtest.Must(t, err)
	t.Cleanup(func() { s.plain.Close() })
	s.fio, err = g.Program(vmtest.Within(t, vmtest.JobLimit), "/usr/bin/fio")
	vmtest.Must(t, err)
	for _, fstype := range []string{"ext4", "ext3", "xfs", "btrfs"} {
		v := s.newVolume(t, fstype, fstype)
		vmtest.Must(t, v.Mount(vmtest.Within(t, vmtest.JobLimit)))
	}
	mapped := s.newVolume(t, "mapped", "ext4")
	mapped.mapped = true
	vmtest.Must(t, g.Attach(vmtest.Limited(t), mapped.Volume.Volume))
	disk, err := g.DeviceOf(vmtest.Limited(t), mapped.DiskID())
	vmtest.Must(t, err)
	s.dmsetup(t, "create", "--table", fmt.Sprintf("0 %d linear %s 0", firstBytes/512, disk), mapped.name)
	mapped.GuestPath = "/run/test/" + mapped.ID
	vmtest.Must(t, g.Remote.Mkdir(vmtest.Limited(t), mapped.GuestPath, 0o755))
	s.mount(t, mapped)
	for _, v := range s.volumes {
		vmtest.Must(t, vm.Again(vmtest.Limited(t), func() (bool, error) { // until it has been examined
			_, err := s.client.GetVolumeHealth(vmtest.Limited(t), v.GuestPath)
			return err == nil, nil
		}))
	}
	return s
}

func (s *soak) newVolume(t *testing.T, name, fstype string) *volume {
	t.Helper()
	scratch, err := s.guest.Volume(vmtest.Limited(t), name, fstype, firstBytes)
	vmtest.Must(t, err)
	v := &volume{Volume: scratch, name: name, size: firstBytes, goal: firstBytes}
	s.volumes = append(s.volumes, v)
	return v
}

// dial makes a connection of its own to the agent.
func (s *soak) dial(ctx context.Context) (*ttrpc.Client, error) {
	conn, err := s.guest.Dial(ctx, agentpb.Port)
	if err != nil {
		return nil, err
	}
	return ttrpc.NewClient(conn), nil
}

func (s *soak) dmsetup(t *testing.T, arguments ...string) string {
	t.Helper()
	output, err := s.guest.Run(vmtest.Within(t, vmtest.JobLimit), "/usr/sbin/dmsetup", arguments...)
	vmtest.Must(t, err)
	return output
}

// mount mounts the mapped volume.
func (s *soak) mount(t *testing.T, v *volume) {
	t.Helper()
	node := "/dev/dm-" + strings.TrimSpace(s.dmsetup(t, "info", "-c", "--noheadings", "-o", "minor", v.name))
	vmtest.Must(t, s.guest.Remote.Mount(vmtest.Within(t, vmtest.JobLimit), remote.Mount{Source: node, Target: v.GuestPath, FSType: v.FSType}))
}

// isIntact mounts a volume again, and reads from the disk what the writers have written. Each kind
// of work must have been done.
func (s *soak) isIntact(t *testing.T, v *volume) {
	t.Helper()
	if v.growths == 0 || v.rounds == 0 || v.ledger == nil {
		t.Errorf("%s has grown %d times, and fio has verified it %d times: this shows nothing", v.name, v.growths, v.rounds)
		return
	}
	if v.mapped {
		vmtest.Must(t, s.guest.Remote.Unmount(vmtest.Within(t, vmtest.JobLimit), v.GuestPath, 0))
		s.mount(t, v)
	} else {
		vmtest.Must(t, v.Unmount(vmtest.Within(t, vmtest.JobLimit)))
		vmtest.Must(t, v.Mount(vmtest.Within(t, vmtest.JobLimit)))
	}
	found, err := s.guest.Remote.Verify(vmtest.Within(t, vmtest.JobLimit), v.GuestPath+"/"+writtenFile, v.ledger, nil)
	if err = errors.Join(err, found.Err()); err != nil {
		t.Errorf("%s: %v", v.name, err)
	}
	if _, err := s.runFio(vmtest.Within(t, vmtest.JobLimit), v, append(verified, "--verify_only")); err != nil {
		t.Errorf("%s: %v", v.name, err)
	}
}

// detach detaches a volume, and checks its filesystem and its end.
func (s *soak) detach(t *testing.T, v *volume) {
	t.Helper()
	if v.mapped {
		vmtest.Must(t, s.guest.Remote.Unmount(vmtest.Within(t, vmtest.JobLimit), v.GuestPath, 0))
		s.dmsetup(t, "remove", v.name)
	}
	vmtest.Must(t, v.Detach(vmtest.Within(t, vmtest.JobLimit)))
	fsck, err := vm.Check(vmtest.Within(t, vmtest.JobLimit), v.FSType, v.Path)
	if err = errors.Join(err, fsck.Err(v.FSType)); err != nil {
		t.Errorf("%s: %v", v.name, err)
	}
	end, err := vm.SizeOnDisk(v.FSType, v.Path)
	vmtest.Must(t, err)
	if end < v.size || end > v.goal {
		t.Errorf("the end of %s\nwant %d to %d\ngot  %d", v.name, v.size, v.goal, end)
	}
	t.Logf("%s: %d growths to %d bytes", v.name, v.growths, end)
}
