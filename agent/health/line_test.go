package health

import (
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// The forms of parseLine as regular expressions. The agent compares without package regexp, which
// would add 100 kB to a program that lies in the guest's memory.
var (
	requestForm    = regexp.MustCompile(`^(?:[a-z_]+: )?[A-Za-z/ ]+ error, dev ([^ ,]+), sector ([0-9]+) op (0x[0-9a-f]+):`)
	filesystemForm = regexp.MustCompile(`^[A-Za-z0-9-]+(?: [a-z]+)? \((?:device )?([^ ()]+)(?:: state [A-Z]+)?\): `)
	sizeForm       = regexp.MustCompile(`^([a-z0-9!-]+): detected capacity change from ([0-9]+) to ([0-9]+)$`)
	bufferForm     = regexp.MustCompile(`^Buffer I/O error on dev(?:ice)? ([^ ,]+), `)
	journalForm    = regexp.MustCompile(`^(?:Aborting journal on device|JBD2: .* (?:on|for|of)) ([^ ]+)-[0-9]+\.?`)
	deviceForm     = regexp.MustCompile(`^([a-z0-9!-]+): `)
)

// parseByForms is parseLine with regular expressions.
func parseByForms(message string) line {
	if found := requestForm.FindStringSubmatch(message); found != nil {
		sector, err := strconv.ParseUint(found[2], 10, 64)
		return line{device: found[1], request: err == nil, sector: sector, read: found[3] == opRead, write: found[3] == opWrite || found[3] == opFlush}
	}
	if found := filesystemForm.FindStringSubmatch(message); found != nil {
		said := message[len(found[0]):]
		return line{
			device: found[1],
			stopped: strings.HasPrefix(message, "EXT4-fs (") && strings.HasPrefix(said, "Remounting filesystem read-only") ||
				strings.HasPrefix(message, "BTRFS ") && strings.HasPrefix(said, "forced readonly"),
			remounted: strings.HasPrefix(said, "re-mounted"),
			failed:    strings.Contains(said, "I/O error"),
		}
	}
	if found := sizeForm.FindStringSubmatch(message); found != nil {
		before, err := strconv.ParseUint(found[2], 10, 64)
		sectors, err2 := strconv.ParseUint(found[3], 10, 64)
		return line{device: found[1], shrunk: err == nil && err2 == nil && sectors != 0 && sectors < before, before: before, sectors: sectors}
	}
	for _, form := range []*regexp.Regexp{bufferForm, journalForm, deviceForm} {
		if found := form.FindStringSubmatch(message); found != nil {
			return line{device: found[1], failed: form == bufferForm || form == deviceForm && strings.HasPrefix(message[len(found[0]):], "writeback error ")}
		}
	}
	return line{}
}

// formSeeds are lines of the kernel and their neighbours: a part is missing, doubled, or has a byte
// more.
var formSeeds = []string{
	"I/O error, dev vda, sector 8 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2",
	"blk_update_request: critical medium error, dev sda, sector 99999999999999999999 op 0x1:(WRITE) flags 0x800",
	"blk_update_request: critical target error, dev sda, sector 0 op 0x2:(FLUSH)", "a: b: I/O error, dev vda, sector 8 op 0x0:",
	" error, dev vda, sector 8 op 0x0:", "I/O error, dev , sector 8 op 0x0:", "I/O error, dev v a, sector 8 op 0x0:",
	"I/O error, dev vda, sector  op 0x0:", "I/O error, dev vda, sector 8 op 0x:", "I/O error, dev vda, sector 8 op 0xG:", "I/O error, dev vda, sector 8 op 0x0",
	"Buffer I/O error on dev vda, logical block 1, lost async page write", "Buffer I/O error on device vda, logical block 1",
	"Buffer I/O error on devvda, x", "Buffer I/O error on device , x", "Buffer I/O error on device vda,x", "Buffer I/O error on dev ice, x",
	"EXT4-fs warning (device vda): ext4_end_bio:343: I/O error 10 writing to inode 12 starting block 11257)",
	"EXT4-fs (vda): Remounting filesystem read-only", "EXT4-fs (vda): re-mounted. Quota mode: none.", "EXT4-fs error (device vda): ext4_find_entry:1: x",
	"XFS (dm-0): log I/O error -5", "XFS (device ): x", "XFS (): x", "XFS (a b): x", "XFS (a (b): x", "XFS Error (vda): x", "XFS  (vda): x", " (vda): x", "XFS (vda):x",
	"EXT4-fs (device device vda): x", "BTRFS info (device vda: state EA): forced readonly", "BTRFS info (device vda): forced readonly", "BTRFS info (device vda: state ): x",
	"Aborting journal on device vda-8.", "Aborting journal on device vda.", "Aborting journal on device -8", "Aborting journal on device dm-0-8.", "Aborting journal on device  vda-8",
	"JBD2: Error -5 detected when updating journal superblock for vda-8.", "JBD2: of dm-1-8x on vdb for c-", "JBD2: on vda-8", "JBD2:  on vda-8", "JBD2: x of of-1 on -2",
	"vda: writeback error on inode 131, offset 1048576, sector 2240",
	"vda: detected capacity change from 8 to 4", "vda: detected capacity change from 8 to 0", "vda: detected capacity change from 8 to 4 ", "vda: detected capacity change from 99999999999999999999 to 4",
	"Vda: detected capacity change from 8 to 4", "vda: detected capacity change from  to 4", "cciss!c0d0: x", "vda:x", ": x", "", "vda: \xff", "\xff: x",
}

func TestLinesAreParsedAsTheirRegularExpressionsSay(t *testing.T) {
	for _, seed := range formSeeds {
		for at := range len(seed) + 1 {
			for _, text := range []string{seed[:at], seed[at:], seed[:at] + seed[min(at+1, len(seed)):], seed[:at] + " " + seed[at:], seed[:at] + "\xff" + seed[at:]} {
				sameAsByForms(t, text)
			}
		}
	}
}

func sameAsByForms(t *testing.T, message string) {
	t.Helper()
	if got, want := parseLine([]byte(message)), parseByForms(message); got != want {
		t.Errorf("%q\nwant %+v\ngot  %+v", message, want, got)
	}
}
