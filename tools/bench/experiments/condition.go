package experiments

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"time"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// faults is the number of volumes that fail in one run, for each row.
	faults = 5
	// beforeFault is the number of bytes that a writer has synced before its disk fails.
	beforeFault = 1 << 20
	// latencyLimit is the goal of these rows, in milliseconds.
	latencyLimit = 50
)

// signal is a sign of a fault that the kernel gives at once.
type signal struct {
	row, fstype string
	bytes       int64
	// fail makes a volume fail, and returns when the fault began.
	fail func(ctx context.Context, guest *vm.Guest, v *vm.Volume) (time.Time, error)
}

var signals = []signal{
	{"condition_latency_write_ext4", "ext4", 64 << 20, failWrite},
	{"condition_latency_write_xfs", "xfs", 304 << 20, failWrite},
	{"condition_latency_error_ext4", "ext4", 64 << 20, failInside},
}

// conditionLatency measures how soon a watcher on the host gets the condition of a volume that has
// failed. Its goal applies to the median.
var conditionLatency = experiment{
	inMemory: true,
	name:     "from a volume's first failure to a watcher's event with a condition",
	lines: []measure.Line{
		{Name: signals[0].row, Unit: "ms", Goal: measure.AtMost(latencyLimit), What: "from the first BLOCK_IO_ERROR of QEMU of the disk of an ext4, under a writer that syncs each block, to the event of WatchVolumes, both as the host reads them"},
		{Name: signals[1].row, Unit: "ms", Goal: measure.AtMost(latencyLimit), What: "the same with an xfs"},
		{Name: signals[2].row, Unit: "ms", Goal: measure.AtMost(latencyLimit), What: "from the host's request for an error in an idle ext4 (trigger_fs_error) to the event"},
		{Name: "condition_latency_worst", Unit: "ms", What: "the longest of all these of a run"},
	},
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		guest, err := l.theGuest(ctx)
		if err != nil {
			return measure.Session{}, err
		}
		return measure.Session{Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			t := measure.Trial{}
			var worst float64
			for _, s := range signals {
				for i := range faults {
					say(fmt.Sprintf("%s, fault %d of %d", s.row, i+1, faults))
					took, err := s.failOnce(ctx, guest, fmt.Sprintf("fails-%s-%d", s.row, i))
					if err != nil {
						return nil, err
					}
					t[s.row] = append(t[s.row], milliseconds(took))
					worst = max(worst, milliseconds(took))
				}
			}
			t["condition_latency_worst"] = []float64{worst}
			return t, nil
		}}, nil
	},
}

// failOnce makes a new volume fail, and returns the time from the fault to the watcher's first
// event with a condition.
func (s signal) failOnce(ctx context.Context, guest *vm.Guest, id string) (took time.Duration, err error) {
	v, err := guest.Volume(ctx, id, s.fstype, s.bytes)
	if err != nil {
		return 0, err
	}
	if err := v.Mount(ctx); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, v.Heal(ctx), v.Detach(ctx)) }()
	if _, err := v.LookedStats(ctx); err != nil { // so that the agent has examined it
		return 0, err
	}
	watching, leave := context.WithCancel(ctx)
	defer leave()
	seen, err := firstCondition(watching, guest, v.GuestPath)
	if err != nil {
		return 0, err
	}
	began, err := s.fail(ctx, guest, v)
	if err != nil {
		return 0, err
	}
	at := <-seen
	if at.err == nil && at.time.Before(began) {
		at.err = errors.New("it had a condition before its fault")
	}
	return at.time.Sub(began), at.err
}

// sighting is when a watcher has seen something, or why it has not.
type sighting struct {
	time time.Time
	err  error
}

// firstCondition returns when a watch has begun, and then sends when the watch first shows a
// condition of a volume.
func firstCondition(ctx context.Context, guest *vm.Guest, path string) (<-chan sighting, error) {
	begun, seen := make(chan struct{}, 1), make(chan sighting, 1)
	go func() {
		for event, err := range guest.Agent().WatchVolumes(ctx) {
			switch {
			case err != nil:
				seen <- sighting{err: fmt.Errorf("the watch has ended: %w", err)}
				return
			case event.Volume != nil && event.Volume.VolumeGuestPath == path && len(event.Volume.Conditions) > 0:
				seen <- sighting{time: time.Now()}
				return
			case event.Type == volumepb.VolumeEvent_RESYNCED && len(begun) == 0:
				begun <- struct{}{}
			}
		}
		seen <- sighting{err: context.Cause(ctx)}
	}()
	select {
	case <-begun:
		return seen, nil
	case at := <-seen:
		return nil, fmt.Errorf("no watch of a healthy volume has begun: %w", at.err)
	}
}

// failWrite breaks the disk under a writer, and returns when QEMU has reported the first failed
// write.
func failWrite(ctx context.Context, guest *vm.Guest, v *vm.Volume) (began time.Time, err error) {
	writer, err := v.StartWriter(ctx, 0)
	if err != nil {
		return began, err
	}
	defer writer.Stop(ctx) // it has failed
	if err := writer.Await(ctx, beforeFault); err != nil {
		return began, err
	}
	failures := guest.VM().QMP().Subscribe("BLOCK_IO_ERROR")
	defer failures.Close()
	if err := v.BreakWrites(ctx); err != nil {
		return began, err
	}
	for {
		select {
		case e := <-failures.Events():
			var failure struct { // BLOCK_IO_ERROR in qapi/block-core.json
				Node string `json:"node-name"`
			}
			if err := json.Unmarshal(e.Data, &failure); err != nil {
				return began, err
			}
			if failure.Node == qemu.RawNode(v.DiskID()) {
				return e.Time, nil
			}
		case <-ctx.Done():
			return began, fmt.Errorf("no write has failed: %w", ctx.Err())
		}
	}
}

// failInside makes an ext4 record an error.
func failInside(ctx context.Context, guest *vm.Guest, v *vm.Volume) (began time.Time, err error) {
	now, err := guest.Agent().GetVolume(ctx, v.GuestPath)
	if err != nil {
		return began, err
	}
	if len(now.Devices) != 1 {
		return began, fmt.Errorf("the devices of volume %s\nwant one\ngot  %v", v.ID, now.Devices)
	}
	began = time.Now()
	return began, guest.Remote.WriteFile(ctx, "/sys/fs/ext4/"+path.Base(now.Devices[0])+"/trigger_fs_error", []byte("provoked"))
}
