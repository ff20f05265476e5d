package experiments

import (
	"strings"
	"testing"
)

func TestTheTotalOfStraceIsRead(t *testing.T) {
	const summary = "syscall              calls\n---------------- ---------\nread                     1\ntotalling               12\n---------------- ---------\ntotal                   29\n"
	if got, err := parseStrace(summary); err != nil || got != 29 {
		t.Errorf("want 29\ngot  %d, %v", got, err)
	}
	for _, wrong := range []string{"", "strace: ptrace: Operation not permitted\n", "total many\n"} {
		if got, err := parseStrace(wrong); err == nil {
			t.Errorf("%q gives %d", wrong, got)
		}
	}
}

func TestFioJobsAreReadByName(t *testing.T) {
	const output = `{"fio version":"fio-3.33","jobs":[
		{"jobname":"randread","read":{"iops":4382.5},"write":{"iops":0.0}},
		{"jobname":"fsync","read":{"iops":0},"write":{"iops":236}}]}`
	jobs, err := parseFio([]byte(output))
	if err != nil {
		t.Fatal(err)
	}
	if jobs["randread"] != 4382.5 || jobs["fsync"] != 236 || len(jobs) != 2 {
		t.Errorf("want randread 4382.5, fsync 236\ngot  %v", jobs)
	}
	if _, err := parseFio([]byte("fio: cannot open file\n")); err == nil || !strings.Contains(err.Error(), "cannot open") {
		t.Errorf("an error that says what fio said is wanted\ngot  %v", err)
	}
}

func TestReadsWritesAndFlushesAreAddedUp(t *testing.T) {
	if got, err := parseRequests("     100 2 3 4    20 6 7 8 9 10 11 1000 13 14 15    5 17\n"); err != nil || got != 125 {
		t.Errorf("want 125\ngot  %d, %v", got, err)
	}
	for _, wrong := range []string{"", "1 2 3", "1 2 3 4 x 6 7 8 9 10 11 12 13 14 15 16 17"} {
		if got, err := parseRequests(wrong); err == nil {
			t.Errorf("%q gives %d", wrong, got)
		}
	}
}

func TestAnonymousMemoryIsReadInBytes(t *testing.T) {
	const status = "Name:\tinit\nVmRSS:\t    9000 kB\nRssAnon:\t    2312 kB\nRssFile:\t    5000 kB\n"
	if got, err := parseRSSAnon("status", status); err != nil || got != 2312*1024 {
		t.Errorf("want %d\ngot  %v, %v", 2312*1024, got, err)
	}
	for _, wrong := range []string{"", "RssAnon:\n", "RssAnon: -1 kB\n", "RssAnon: 99999999999 kB\n", "RssAnon: 4 MB\n"} {
		if got, err := parseRSSAnon("status", wrong); err == nil {
			t.Errorf("%q gives %v", wrong, got)
		}
	}
}

func TestOnlyUeventSocketsOfProcessesAreCounted(t *testing.T) {
	const table = `sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode
00000000f41ca6ef 0   0          00000000 0        0        0     2        0        4
00000000f41ca6ee 15  0          00000000 0        0        0     2        0        7
00000000f41ca6ed 15  1          00000001 0        0        0     2        0        901
00000000f41ca6ec 15  4294963251 00000001 0        0        0     2        0        902
00000000f41ca6eb 16  15         00000000 0        0        0     2        0        903
`
	if got := countUeventSockets(table); got != 2 {
		t.Errorf("want 2\ngot  %d", got)
	}
}
