package experiments

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// ringBytes is the size of an xfs with four whole allocation groups. XFS makes no group of
	// fewer than 64 blocks (XFS_MIN_AG_BLOCKS). After the disk has grown by less, the filesystem
	// therefore cannot grow, and ResizeVolume waits for the disk and does nothing else.
	ringBytes = 320 << 20
	ringBlock = 4096
	ringRest  = 63 * ringBlock
	sector    = 512

	// growths is the number of growths of the disk in one run, if the disk has room for those of
	// all runs.
	growths = 20
)

var diskGrown = experiment{
	name: "a disk grows under a ResizeVolume that waits for it",
	lines: []measure.Line{
		echoLine,
		{Name: "block_resize_to_answer", Unit: "µs", Baseline: echoLine.Name, Goal: measure.AtMost(5),
			What: "from QMP's answer to block_resize to the answer of a ResizeVolume that waited for it and has nothing to grow, less one echo: the ratio is this in echoes"},
	},
	open: func(ctx context.Context, l *Setup, runs int) (measure.Session, error) {
		guest, err := l.theGuest(ctx)
		if err != nil {
			return measure.Session{}, err
		}
		ring, err := l.newDisk(ctx, guest, "ring", "xfs", ringBytes)
		if err != nil {
			return measure.Session{}, err
		}
		if err := ring.attach(ctx); err != nil {
			return measure.Session{}, err
		}
		if err := ring.mount(ctx); err != nil {
			return measure.Session{}, err
		}
		d := &growingDisk{disk: ring, size: ringBytes + ringBlock, each: min(growths, (ringRest-ringBlock)/sector/runs)}
		return measure.Session{Run: d.run, Close: ring.remove}, nil
	},
}

// growingDisk is a volume whose disk grows sector by sector.
type growingDisk struct {
	*disk
	size uint64 // the disk's next size
	each int    // growths per run
}

func (d *growingDisk) run(ctx context.Context, say func(string)) (measure.Trial, error) {
	e, err := dialEcho(ctx, d.guest)
	if err != nil {
		return nil, err
	}
	defer e.Close()
	defer quiet()()
	var seen, echoes []float64
	for i := range d.each {
		say(fmt.Sprintf("%d of %d", i+1, d.each))
		took, err := d.grow(ctx)
		if err != nil {
			return nil, err
		}
		some, err := e.several(echoesBeside / 4)
		if err != nil {
			return nil, err
		}
		seen, echoes = append(seen, microseconds(took)), append(echoes, some...)
	}
	for i := range seen {
		seen[i] -= measure.Median(echoes)
	}
	return measure.Trial{"block_resize_to_answer": seen, echoLine.Name: echoes}, nil
}

// grow grows the disk, and returns the time from QMP's answer to the agent's answer.
func (d *growingDisk) grow(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	before, err := ueventSockets(ctx, d.guest.Remote)
	if err != nil {
		return 0, err
	}
	type answer struct {
		at  time.Time
		err error
	}
	answered := make(chan answer, 1)
	go func() {
		err := d.guest.Agent().ResizeVolume(ctx, d.GuestPath, d.size)
		answered <- answer{time.Now(), err}
	}()
	if err := d.awaitWaiting(ctx, before); err != nil {
		return 0, err
	}
	arguments := map[string]any{"node-name": qemu.RawNode(d.DiskID()), "size": d.size}
	err = d.guest.VM().QMP().Execute(ctx, "block_resize", arguments, nil)
	acknowledged := time.Now()
	if err != nil {
		return 0, err
	}
	d.size += sector
	a := <-answered
	return a.at.Sub(acknowledged), a.err
}

// looks is the number of checks whether the agent waits.
const looks = 50

// awaitWaiting returns when the agent waits for the disk: then it has one more socket for uevents
// than before.
func (d *growingDisk) awaitWaiting(ctx context.Context, before int) error {
	for range looks {
		now, err := ueventSockets(ctx, d.guest.Remote)
		if err != nil || now > before {
			return err
		}
	}
	return errors.New("the agent opens no socket for uevents while it waits for a disk: the start of its wait cannot be seen")
}

// ueventSockets counts the guest's sockets of NETLINK_KOBJECT_UEVENT.
func ueventSockets(ctx context.Context, a *remote.Client) (int, error) {
	text, err := a.ReadFile(ctx, "/proc/net/netlink")
	return countUeventSockets(string(text)), err
}

// ueventProtocol is NETLINK_KOBJECT_UEVENT of <linux/netlink.h>.
const ueventProtocol = "15"

// countUeventSockets counts the sockets in /proc/net/netlink (net/netlink/af_netlink.c,
// netlink_native_seq_show) whose second column, the protocol, is ueventProtocol. It skips the
// kernel's own sockets, which have port 0.
func countUeventSockets(table string) (n int) {
	for text := range strings.Lines(table) {
		if fields := strings.Fields(text); len(fields) > 3 && fields[1] == ueventProtocol && fields[2] != "0" {
			n++
		}
	}
	return n
}
