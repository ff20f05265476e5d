package health

import (
	"bytes"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// FuzzKernelLog reads any record of /dev/kmsg, and looks for any device in it,
// as slowly and plainly as it can be done.
func FuzzKernelLog(f *testing.F) {
	for _, record := range []string{
		"3,1234,5678901,-;I/O error, dev vda, sector 8 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2\n SUBSYSTEM=block\n DEVICE=b254:0\n",
		"2,9,9,-;Aborting journal on device vda-8.\n", "1,9,9,-;XFS (dm-0): log I/O error -5\n",
		"11,1,2,-;I/O error, dev vda\n", "6,1,2,c;vdavda xvda vda1 vda", ";", "4294967296,1;vda", "+3,1;vda", "7;a\\x0ab\n",
	} {
		f.Add([]byte(record), "vda")
		f.Add([]byte(record), "dm-0")
	}
	f.Add([]byte("6,1,2,-;xa-a-a"), "a-a") // the second place overlaps the first
	f.Add([]byte("6,1,2,-;vdavda"), "vda") // and here neither is a word
	f.Fuzz(func(t *testing.T, record []byte, name string) {
		message, kernels := messageOf(record)
		if bytes.IndexByte(message, '\n') >= 0 || !bytes.Contains(record, message) {
			t.Errorf("%q has the message %q", record, message)
		}
		if want := kernelPriority.Match(record); kernels != want {
			t.Errorf("%q is the kernel's\nwant %v\ngot  %v", record, want, kernels)
		}
		if name == "" || len(record)*len(name) > 1<<16 {
			return // no device is called so
		}
		if got, want := mentions(message, name), standsAlone(string(message), name); got != want {
			t.Errorf("%q names %q\nwant %v\ngot  %v", message, name, want, got)
		}
		isReadError(message)
	})
}

// kernelPriority begins a record of facility 0.
var kernelPriority = regexp.MustCompile(`^0*[0-7](,|;|$)`)

// standsAlone looks for a word at every place.
func standsAlone(text, word string) bool {
	letter := func(at int) bool {
		return at >= 0 && at < len(text) && strings.IndexByte("_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", text[at]) >= 0
	}
	for at := range len(text) {
		if strings.HasPrefix(text[at:], word) && !letter(at-1) && !letter(at+len(word)) {
			return true
		}
	}
	return false
}

// FuzzDeviceStat finds the writes in a stat file as the kernel prints it
// (part_stat_show in block/genhd.c), and in any text nothing that is not there.
func FuzzDeviceStat(f *testing.F) {
	f.Add("     420        0    13720       84     1536      310   196608     2210\n", uint64(1536), uint64(0))
	f.Add("1 2 3 4 18446744073709551616", uint64(1<<64-1), uint64(1<<64-1))
	f.Add("1 2 3 4 -5 \x00 5", uint64(0), uint64(1))
	f.Fuzz(func(t *testing.T, text string, writes, other uint64) {
		line := fmt.Sprintf("%8d %8d %8d %8d %8d %8d %8d\n", other, other, other, other, writes, other, other)
		if got := parseWrites(line); got != writes {
			t.Errorf("%q\nwant %d\ngot  %d", line, writes, got)
		}
		if n := parseWrites(text); n != 0 && !strings.Contains(text, strconv.FormatUint(n, 10)) {
			t.Errorf("%q has %d writes", text, n)
		}
	})
}
