package health

import (
	"context"
	"io"
	"io/fs"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/mount"
)

// Messages as kernels print them, and fault lines of programs with misleading names. line says for
// each which device it names, and whether it reports a failed read.
func TestKernelLogIsReadFromItsFirstWord(t *testing.T) {
	for message, want := range map[string]line{
		"I/O error, dev vda, sector 8 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2":                          {device: "vda", request: true, sector: 8, write: true},
		"operation not supported error, dev vda, sector 8 op 0x3:(DISCARD) flags 0x800 phys_seg 1 prio class 2":    {device: "vda", request: true, sector: 8},
		"I/O error, dev vda, sector 16576 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2":                     {device: "vda", request: true, sector: 16576, read: true},
		"critical medium error, dev sda, sector 16576 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2":         {device: "sda", request: true, sector: 16576, read: true},
		"blk_update_request: I/O error, dev vdb, sector 16576 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2": {device: "vdb", request: true, sector: 16576, read: true},
		"Buffer I/O error on dev vda, logical block 0, lost async page write":                                      {device: "vda", failed: true},
		"Aborting journal on device vda-8.":                                                                               {device: "vda"},
		"JBD2: Detected IO errors while flushing file data on dm-0-8":                                                     {device: "dm-0"},
		"XFS (vda): log I/O error -5":                                                                                     {device: "vda", failed: true},
		"EXT4-fs error (device vda): ext4_journal_check_start:83: comm init: Detected aborted journal":                    {device: "vda"},
		"EXT4-fs (vda): Remounting filesystem read-only":                                                                  {device: "vda", stopped: true},
		"EXT4-fs (vda): re-mounted 1d2b. Quota mode: none.":                                                               {device: "vda", remounted: true},
		"BTRFS info (device vda: state E): forced readonly":                                                               {device: "vda", stopped: true},
		"BTRFS info (device vda): forced readonly":                                                                        {device: "vda", stopped: true},
		"BTRFS error (device vda): bdev /dev/vda errs: wr 1, rd 0, flush 0, corrupt 0, gen 0":                             {device: "vda"},
		"vda: detected capacity change from 1048576 to 131072":                                                            {device: "vda", shrunk: true, before: 1048576, sectors: 131072},
		"vda: detected capacity change from 131072 to 1048576":                                                            {device: "vda", before: 131072, sectors: 1048576},
		"a.out[211]: segfault at 0 ip 0 sp 0 error 4 in I/O error, dev vda, sector 8 op 0x0:(READ) flags[400000+1000]":    {}, // a file's name
		"error, dev vda,[211]: segfault at 0 ip 0000000000401000 sp 00007ffd error 4 in error, dev vda, op 0x0:(READ)[1]": {},
		"sda: detected capacity change from 1048576 to 0":                                                                 {device: "sda", before: 1048576}, // its size is not known
		"virtio_blk virtio1: [nvda] 131072 512-byte logical blocks":                                                       {},
		"traps: XFS (vda): x[9] general protection fault":                                                                 {device: "traps"}, // no device
		"": {},
	} {
		if got := parseLine([]byte(message)); got != want {
			t.Errorf("%q\nwant %+v\ngot  %+v", message, want, got)
		}
	}
}

// The kernel logs a partition's failed requests with the name of its disk. Those of another
// partition must not count.
func TestPartitionIsFoundByItsDiskAndSector(t *testing.T) {
	part := func() (blockdev.Partition, bool) {
		return blockdev.Partition{Disk: "vda", Start: 2048, Sectors: 1000}, true
	}
	unknown := func() (blockdev.Partition, bool) { return blockdev.Partition{Disk: "vda"}, false }
	whole := func() (blockdev.Partition, bool) { return blockdev.Partition{}, false }
	const in, out = "I/O error, dev vda, sector 2050 op 0x0:(READ) flags 0x80700", "I/O error, dev vda, sector 8 op 0x0:(READ) flags 0x80700"
	for _, test := range []struct {
		message, name string
		partition     func() (blockdev.Partition, bool)
		want          concern
	}{
		{in, "vda", whole, yes},
		{in, "vda1", part, yes},
		{out, "vda1", part, no},
		{in, "vda1", unknown, maybe},
		{in, "vdaa", whole, no}, // another disk
		{in, "vdb1", part, no},
		{"vda: detected capacity change from 131072 to 1048576", "vda1", part, maybe},
		{"EXT4-fs error (device vda1): x:1: comm y: z", "vda1", part, yes},
		{"EXT4-fs error (device vda2): x:1: comm y: z", "vda1", part, no},
		{"I/O error, dev vda, sector 99999999999999999999 op 0x0:(READ) flags 0x80700", "vda1", part, maybe},
		{"", "vda1", part, no},
	} {
		if got := parseLine([]byte(test.message)).concerns(test.name, test.partition); got != test.want {
			t.Errorf("%q, of %s\nwant %v\ngot  %v", test.message, test.name, test.want, got)
		}
	}
}

func TestMappingIsFoundByTheSectorOfItsDisk(t *testing.T) {
	for message, want := range map[string]concern{
		"I/O error, dev vda, sector 2050 op 0x0:(READ) flags 0x80700":  yes,
		"I/O error, dev vda, sector 8 op 0x0:(READ) flags 0x80700":     maybe, // or of an earlier target
		"I/O error, dev vdb, sector 2050 op 0x0:(READ) flags 0x80700":  no,
		"I/O error, dev vdaa, sector 2050 op 0x0:(READ) flags 0x80700": no,
		"vda: detected capacity change from 131072 to 1048576":         maybe,
		"": no,
	} {
		below := func() []string { return []string{"dm-0", "vda"} }
		has := func(sector uint64) bool { return sector >= 2048 }
		if got := parseLine([]byte(message)).concernsMapping(below, has); got != want {
			t.Errorf("%q\nwant %v\ngot  %v", message, want, got)
		}
	}
}

func TestKmsgRecordIsCutToItsMessage(t *testing.T) {
	record := "3,1234,5678901,-;I/O error, dev vda, sector 8\n SUBSYSTEM=block\n DEVICE=b254:0\n"
	if got, kernels := messageOf([]byte(record)); string(got) != "I/O error, dev vda, sector 8" || !kernels {
		t.Errorf("got %q, %v", got, kernels)
	}
	for _, record := range []string{"11,1,2,-;I/O error, dev vda, sector 8\n", ";x", "x,1;y", ""} {
		if got, kernels := messageOf([]byte(record)); kernels {
			t.Errorf("%q is taken for the kernel's: %q", record, got)
		}
	}
}

func TestEveryFailedProbeGivesAConditionWithARemedy(t *testing.T) {
	for errno, test := range map[unix.Errno]struct {
		fstype string
		status Status
		reason string
		advice string
	}{
		unix.EROFS:     {"ext4", Inaccessible, ReasonReadOnly, "e2fsck -p"},
		unix.ESHUTDOWN: {"xfs", Inaccessible, ReasonShutdown, "unmount and mount it again"},
		unix.EIO:       {"xfs", Inaccessible, ReasonIOError, "repair the disk"},
		unix.ENXIO:     {"ext4", Inaccessible, ReasonIOError, "repair the disk"},
		unix.ENOSPC:    {"xfs", Degraded, ReasonOutOfSpace, "grow the volume"},
	} {
		target := Target{Mountpoint: "/v", Device: blockdev.Device{Path: "/dev/vda", Name: "vda"}, FSType: test.fstype}
		fstype, ok := filesystem.Lookup(test.fstype)
		if !ok {
			t.Fatal(test.fstype)
		}
		got := judge(target, fstype.Faults.Repair, &fs.PathError{Op: "open", Path: "/v", Err: errno}).conditions
		if len(got) != 1 || got[0].Status != test.status || got[0].Reason != test.reason || !strings.Contains(got[0].Message, test.advice) || !strings.Contains(got[0].Message, "/dev/vda") {
			t.Errorf("%v: got %+v", errno, got)
		}
	}
}

func TestErrorOutsideTheFilesystemIsNoCondition(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOMEM, unix.EMFILE, unix.EOPNOTSUPP, unix.EPERM, unix.ENOENT} {
		got := judge(Target{FSType: "ext4"}, "", &fs.PathError{Op: "open", Path: "/v", Err: errno})
		if len(got.conditions) > 0 || got.failure == nil {
			t.Errorf("%v: got %+v", errno, got)
		}
	}
}

func TestStatHasTheCountsOfRequests(t *testing.T) {
	for text, want := range map[string]counts{
		"     420        0    13720       84     1536      310   196608     2210        3     1804     2412        7        0        0        0      117      117\n": {reads: 420, writes: 1536, inFlight: 3, discards: 7, flushes: 117, reading: 84, writing: 2210, flushing: 117},
		"1 2 3 4 5 6 7 8 9 10 11":  {reads: 1, writes: 5, inFlight: 9, reading: 4, writing: 8},
		"1 2 3 4 -5 6 7 8 9 10 11": {},
		"1 2 3":                    {},
		"":                         {},
	} {
		if got, ok := parseCounts(strings.Fields(text)); got != want || ok != (want != counts{}) {
			t.Errorf("%q\nwant %+v\ngot  %+v, %v", text, want, got, ok)
		}
	}
}

// A disk hangs if it has requests in flight and none ends. A busy disk and an idle disk do not
// hang.
func TestDiskHangsOnlyByItsRequests(t *testing.T) {
	for name, test := range map[string]struct {
		beat func(i uint64) counts
		want bool
	}{
		"idle":                 {func(uint64) counts { return counts{writes: 7} }, false},
		"busy":                 {func(i uint64) counts { return counts{writes: i, inFlight: 64} }, false},
		"ends one a beat":      {func(i uint64) counts { return counts{reads: i, inFlight: 1} }, false},
		"no request ends":      {func(uint64) counts { return counts{writes: 7, inFlight: 1} }, true},
		"now and then in vain": {func(i uint64) counts { return counts{writes: i / 3, inFlight: 1} }, false},
	} {
		var s stall
		hung := false
		for i := range uint64(20) {
			s.beat(test.beat(i))
			hung = hung || s.hangs()
		}
		if hung != test.want {
			t.Errorf("%s\nwant hung %v\ngot  %v", name, test.want, hung)
		}
	}
	// A late look, for instance after a pause of the whole guest, proves nothing.
	s := stall{}
	s.beat(counts{writes: 7, inFlight: 1})
	s.beat(counts{writes: 7, inFlight: 1})
	if s.beat(counts{writes: 8}); s.hangs() {
		t.Error("a disk hangs though its request has ended")
	}
}

func TestDiskIsSuspectWhenWritingStops(t *testing.T) {
	var s stall
	for i, writes := range []uint64{0, 0, 5, 9, 9, 9, 12, 12} {
		want := i == 4 || i == 7
		if got := s.beat(counts{writes: writes, reads: uint64(i)}); got != want {
			t.Errorf("beat %d\nwant %v\ngot  %v", i, want, got)
		}
	}
}

// While a thread of the agent's may wait for a flush, which the kernel does not count in flight,
// one read shows whether the disk answers. If it does, it is not asked again before the flush has
// ended.
func TestDiskIsAskedOnceWhileNothingIsInFlight(t *testing.T) {
	var s stall
	for i, step := range []struct {
		now  counts
		want bool
	}{
		{counts{writes: 7}, false},                       // has just ended writes
		{counts{writes: 7}, true},                        // silent: it is asked
		{counts{writes: 7, inFlight: 1}, false},          // the read is in flight
		{counts{writes: 7, reads: 1}, false},             // it has ended
		{counts{writes: 7, reads: 1}, false},             // the flush has not
		{counts{writes: 7, reads: 1, flushes: 1}, false}, // now it has
		{counts{writes: 7, reads: 1, flushes: 1}, true},  // and the next one hangs
		{counts{writes: 7, reads: 1, inFlight: 9}, false},
	} {
		s.beat(step.now)
		if got := s.isUnknown(); got != step.want {
			t.Errorf("step %d, %+v\nwant asked %v\ngot  %v", i, step.now, step.want, got)
		}
		s.asked = s.asked || step.want
	}
}

// A deliberate remount makes the mount read-only, too, and not only the filesystem.
func TestExt4StoppedByAnErrorDiffersFromAReadOnlyRemount(t *testing.T) {
	for line, test := range map[string]struct {
		errors uint64
		want   bool
	}{
		"40 22 254:0 / /v rw,relatime - ext4 /dev/vda ro":              {1, true},
		"40 22 254:0 / /v rw - ext4 /dev/vda ro,errors=remount-ro":     {0, false}, // somebody has remounted another mount of it
		"40 22 254:0 / /v ro,relatime - ext4 /dev/vda ro":              {1, false},
		"40 22 254:0 / /v rw,relatime - ext4 /dev/vda rw":              {1, false},
		"40 22 254:0 / /v rw,relatime - ext4 /dev/vda rw,emergency_ro": {0, true},
	} {
		mounts, err := mount.Read(strings.NewReader(line + "\n"))
		if err != nil || len(mounts) != 1 {
			t.Fatal(mounts, err)
		}
		if got := isStopped(mounts[0], test.errors); got != test.want {
			t.Errorf("%s, %d errors\nwant %v\ngot  %v", line, test.errors, test.want, got)
		}
	}
}

func TestDiskStatsAreReadUpToABound(t *testing.T) {
	for size, want := range map[int]int{0: 0, 4096: 4096, diskStatsBytes: diskStatsBytes, diskStatsBytes + 1: diskStatsBytes} {
		if text, err := readDiskStats(strings.NewReader(strings.Repeat("x", size))); err != nil || len(text) != want {
			t.Errorf("of %d bytes\nwant %d\ngot  %d, error %v", size, want, len(text), err)
		}
	}
}

// A disk whose request does not end hangs after three intervals in which nothing has ended, and is
// silent for as long.
func TestDiskHangsAfterThreeBeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := logrus.New()
		log.SetOutput(io.Discard)
		m := NewMonitor(logrus.NewEntry(log))
		w := &Watch{monitor: m, target: Target{Device: blockdev.Device{Number: unix.Mkdev(254, 1)}}, poked: make(chan struct{}, 1), doubted: make(chan struct{}, 1), looked: make(chan struct{})}
		m.add(w)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go m.beats(ctx, func() ([]byte, error) {
			return []byte("254 1 vda1 5 0 40 9 7 0 56 9 1 9 18\n"), nil // 1 request in flight
		})
		began := time.Now()
		for !w.Hangs() {
			time.Sleep(beatInterval / 8)
			synctest.Wait()
		}
		first := beatInterval // shows what has ended so far
		if want, took := first+hungBeats*beatInterval, time.Since(began); took != want || w.Silent() != hungBeats*time.Second {
			t.Errorf("want it to hang after %v, silent for %v\ngot  %v, %v", want, hungBeats*time.Second, took, w.Silent())
		}
	})
}

// Under load, an examination may wait for a processor, for a filesystem's log or behind the writes
// of others, and the disk is healthy. The counts are those of a guest with fio on five volumes, in
// which an examination took 10 s.
func TestBusyDiskThatEndsItsRequestsSoonIsNotSlow(t *testing.T) {
	before := counts{reads: 800, writes: 1871, flushes: 121, reading: 8190, writing: 40_000, flushing: 4636}
	for name, test := range map[string]struct {
		now  counts
		want bool
	}{
		"nothing ended":                 {before, false},
		"few ended":                     {counts{reads: 800, writes: 1874, flushes: 121, reading: 8190, writing: 40_000 + 3, flushing: 4636}, false},
		"some ended soon":               {counts{reads: 800, writes: 1875, flushes: 121, reading: 8190, writing: 40_000 + 44, flushing: 4636}, true},
		"busy, some ended soon":         {counts{reads: 800, writes: 1898, flushes: 121, reading: 8190, writing: 40_000 + 553, flushing: 4636}, true},
		"some ended, each took 1 s":     {counts{reads: 800, writes: 1875, flushes: 122, reading: 8190, writing: 40_000 + 4000, flushing: 4636 + 1000}, false},
		"many ended, each took 1 s":     {counts{reads: 868, writes: 1954, flushes: 140, reading: 8190 + 68_000, writing: 40_000 + 83_000, flushing: 4636 + 19_000}, false},
		"many ended, each too late":     {counts{reads: 900, writes: 1871, flushes: 121, reading: 8190 + 25_000, writing: 40_000, flushing: 4636}, false},
		"many ended, each in time":      {counts{reads: 900, writes: 1871, flushes: 121, reading: 8190 + 24_900, writing: 40_000, flushing: 4636}, true},
		"many ended, flushes took 2 s":  {counts{reads: 800, writes: 1971, flushes: 123, reading: 8190, writing: 40_000 + 400, flushing: 4636 + 4000}, false},
		"reads ended soon, writes late": {counts{reads: 9800, writes: 1876, flushes: 121, reading: 8190 + 900, writing: 40_000 + 10_000, flushing: 4636}, false},
		"reads ended soon, one did not": {counts{reads: 9800, writes: 1872, flushes: 121, reading: 8190 + 900, writing: 40_000 + 900, flushing: 4636}, true},
		"writes ended soon, reads late": {counts{reads: 805, writes: 9871, flushes: 121, reading: 8190 + 10_000, writing: 40_000 + 900, flushing: 4636}, false},
		"many ended, flushes in time":   {counts{reads: 800, writes: 1971, flushes: 123, reading: 8190, writing: 40_000 + 400, flushing: 4636 + 1900}, true},
		"four flushes ended, in time":   {counts{reads: 800, writes: 1871, flushes: 125, reading: 8190, writing: 40_000, flushing: 4636 + 3900}, true},
		"four flushes ended, each late": {counts{reads: 800, writes: 1871, flushes: 125, reading: 8190, writing: 40_000, flushing: 4636 + 4000}, false},
		"it is gone":                    {counts{}, false},
		"its counts began anew":         {counts{reads: 3000, reading: 7}, false},
	} {
		if got := test.now.isQuick(before); got != test.want {
			t.Errorf("%s\nwant %v\ngot  %v", name, test.want, got)
		}
	}
}

// While the writes of a disk hang, its reads may be answered from a cache of the host. Requests end
// soon then, and only an examination that waits for its own write shows the fault.
func TestExaminationWhoseKindOfRequestsHasStoppedIsSlow(t *testing.T) {
	over, end := context.WithCancel(t.Context())
	end()
	for name, test := range map[string]struct {
		writes bool
		each   counts // what ends in each beat
		beats  int
		late   context.Context
		want   bool
	}{
		"reads end, it writes":            {true, counts{reads: 1000, reading: 900}, stillBeats, over, true},
		"reads end, it only reads":        {false, counts{reads: 1000, reading: 900}, stillBeats, over, false},
		"writes end":                      {true, counts{reads: 1000, writes: 1, reading: 900}, stillBeats, over, false},
		"discards end":                    {true, counts{reads: 1000, discards: 1, reading: 900}, stillBeats, over, false},
		"flushes end":                     {true, counts{reads: 1000, flushes: 1, reading: 900}, stillBeats, over, false},
		"nothing ends any more":           {false, counts{}, stillBeats, over, true},
		"reads end, it has not waited":    {true, counts{reads: 1000, reading: 900}, stillBeats - 1, over, false},
		"reads end, it is not late":       {true, counts{reads: 1000, reading: 900}, stillBeats, t.Context(), false},
		"reads end, it waited for longer": {true, counts{reads: 1000, reading: 900}, 2 * stillBeats, over, true},
	} {
		now := counts{reads: 10, writes: 10, flushes: 10, inFlight: 1}
		e := &examination{late: test.late, writes: test.writes, before: now, last: now}
		now.reads, now.writes, now.writing = now.reads+4, now.writes+4, now.writing+4 // soon, before they stop
		e.beat(now)
		for range test.beats {
			now.reads, now.writes, now.discards, now.flushes = now.reads+test.each.reads, now.writes+test.each.writes, now.discards+test.each.discards, now.flushes+test.each.flushes
			now.reading += test.each.reading
			e.beat(now)
		}
		if got := e.isSlow(now); got != test.want {
			t.Errorf("%s\nwant slow %v\ngot       %v", name, test.want, got)
		}
		now.writes++ // the disk answers again
		if e.beat(now); e.isSlow(now) != test.want {
			t.Errorf("%s, and then a write has ended\nwant slow %v\ngot       %v", name, test.want, !test.want)
		}
	}
}
