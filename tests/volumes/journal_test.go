package volumes

import "testing"

// A block of metadata takes no write, and nothing needs the block before the unmount writes the
// journal back: here the directory's block with the name of a file whose fsyncs have all succeeded.
// The unmount must keep the journal, which is the only place that has the name, and the next mount
// must replay it. The disk is detached in between, so that no cache of the guest has the block.
//
// Without EXT4_IOC_CHECKPOINT, the kernel (6.1) clears the superblock's needs_recovery at this
// unmount, and the next mount discards the journal.
func TestUnmountKeepsTheJournalOfABlockThatTakesNoWrite(t *testing.T) {
	g := guest(t)
	for _, fstype := range []string{"ext3", "ext4"} {
		t.Run(fstype, func(t *testing.T) {
			v := mounted(t, g, fstype)
			directory, err := g.Remote.DiskOffset(limited(t), v.GuestPath)
			must(t, err)
			writer := written(t, v, 2*miB)
			must(t, v.BreakWritesAt(limited(t), directory))
			healsAtEnd(t, v)
			must(t, v.Unmount(limited(t)))
			must(t, v.Heal(limited(t)))
			must(t, v.Detach(limited(t)))
			must(t, v.Mount(limited(t)))
			if got, err := v.Verify(limited(t), nil); err != nil || got != writer.Ledger().Bytes() {
				t.Errorf("bytes acknowledged and equal after the next mount\nwant %d\ngot  %d, error %v", writer.Ledger().Bytes(), got, err)
			}
			repair(t, v) // clears the recorded error
			isHealthy(t, v)
		})
	}
}
