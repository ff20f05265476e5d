package health

import (
	"os"
	"strings"
	"testing"
)

// The test writes to the log as a process, so its lines must not be quoted.
// TestImpossibleStorageIsRefused in tests/volumes checks the kernel's own lines.
func TestProcessIsNotQuotedAsTheKernel(t *testing.T) {
	log := OpenKernelLog()
	defer log.Close()
	kmsg, err := os.OpenFile("/dev/kmsg", os.O_WRONLY, 0)
	if err != nil || log.file == nil {
		t.Skipf("%v: the kernel's log is root's: run as root: go test -run Quoted ./agent/health", err)
	}
	defer kmsg.Close()
	if _, err := kmsg.WriteString("EXT4-fs (dvtest): VFS: Can't find ext4 filesystem\n"); err != nil {
		t.Fatal(err)
	}
	seen := false
	if err := readKmsg(log.file, func(record []byte) { seen = seen || strings.Contains(string(record), "(dvtest)") }); err != nil || !seen {
		t.Fatalf("the log from its moment on: want the line, got %v, %v", seen, err)
	}
	again := OpenKernelLog()
	defer again.Close()
	if said := again.Said("dvtest") + log.Said("dvtest"); said != "" {
		t.Errorf("\nwant nothing quoted\ngot  %s", said)
	}
}
