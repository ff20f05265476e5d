package health

import (
	"bytes"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzKernelLog parses any record of /dev/kmsg, and checks that it finds only what the record
// contains.
func FuzzKernelLog(f *testing.F) {
	for _, record := range []string{
		"3,1234,5678901,-;I/O error, dev vda, sector 8 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2\n SUBSYSTEM=block\n DEVICE=b254:0\n",
		"2,9,9,-;Aborting journal on device vda-8.\n", "1,9,9,-;XFS (dm-0): log I/O error -5\n",
		"11,1,2,-;I/O error, dev vda\n", "6,1,2,c;vdavda xvda vda1 vda", ";", "4294967296,1;vda", "+3,1;vda", "7;a\\x0ab\n",
	} {
		f.Add([]byte(record))
	}
	for _, message := range formSeeds {
		f.Add([]byte("3,1,2,-;" + message))
	}
	f.Fuzz(func(t *testing.T, record []byte) {
		message, kernels := messageOf(record)
		if bytes.IndexByte(message, '\n') >= 0 || !bytes.Contains(record, message) {
			t.Errorf("%q has the message %q", record, message)
		}
		if want := kernelPriority.Match(record); kernels != want {
			t.Errorf("%q is the kernel's\nwant %v\ngot  %v", record, want, kernels)
		}
		sameAsByForms(t, string(message))
		got := parseLine(message)
		if got.device != "" && !bytes.Contains(message, []byte(got.device)) || got.device == "" && got != (line{}) {
			t.Errorf("%q says %+v", message, got)
		}
		// A line with a program's name (at most 15 bytes), its id and its fault must not look like
		// a failed request.
		if fault := append(append([]byte{}, message[:min(len(message), 15)]...), "[12]: segfault at 0 ip 0 sp 0 error 4 in "...); parseLine(append(fault, message...)).read {
			t.Errorf("a program called %q makes a failed read", message)
		}
	})
}

// kernelPriority matches the beginning of a record of facility 0.
var kernelPriority = regexp.MustCompile(`^0*[0-7](,|;|$)`)

// FuzzDeviceStat checks that the counts are found in a stat file as the kernel prints it
// (part_stat_show in block/genhd.c), and that any other text yields only what it contains.
func FuzzDeviceStat(f *testing.F) {
	f.Add("     420        0    13720       84     1536      310   196608     2210\n", uint64(1536), uint64(0))
	f.Add("1 2 3 4 18446744073709551616 6 7 8 9 10 11", uint64(1<<64-1), uint64(1<<64-1))
	f.Add("254 0 vda 1 2 3 4 -5 \x00 5 8 9 10 11", uint64(0), uint64(1))
	f.Fuzz(func(t *testing.T, text string, writes, inFlight uint64) {
		line := fmt.Sprintf("%8d %8d %8d %8d %8d %8d %8d %8d %8d %8d %8d\n", 1, 2, 3, 4, writes, 5, 6, 7, inFlight, 8, 9)
		if got, ok := parseCounts(strings.Fields(line)); !ok || got.writes != writes || got.inFlight != inFlight {
			t.Errorf("%q\nwant %d and %d\ngot  %+v", line, writes, inFlight, got)
		}
		if got := parseDiskStats(" 254 16 vdb " + line + text)[unix.Mkdev(254, 16)]; got.writes != writes && !strings.Contains(text, "254") {
			t.Errorf("%q\nwant %d writes\ngot  %+v", line, writes, got)
		}
		for number, c := range parseDiskStats(text) {
			for _, n := range []uint64{uint64(unix.Major(number)), c.reads, c.writes, c.discards, c.flushes, c.inFlight} {
				if n != 0 && !strings.Contains(text, strconv.FormatUint(n, 10)) {
					t.Errorf("%q has %d", text, n)
				}
			}
		}
	})
}
