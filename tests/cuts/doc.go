// Package cuts holds the campaign of power cuts: volumes that grow under their
// writers lose their power, and then have to mount, hold every block that was
// acknowledged, grow on, and pass fsck without a word. TestTwentyCutsLoseNothing is
// its short form, in `make test`; `make test-long` runs TestCampaignOfCutsLosesNothing
// and writes what came of it to build/cuts.md, and the tests with the newer kernel.
//
// There are two kinds of cut. In a kill QEMU is killed at some moment: what it had
// written is there, flushed or not, as the host's page cache stays. In a replay the
// image is made from a record of all writes and flushes (tests/cuts/logwrites), as a
// disk may look whose own cache has lost its power: every write up to the last flush
// before the point, and of those behind it none, some or all, torn at 4096 bytes.
// Discards change nothing there. The image is as large as the disk was: the host's
// growth stays. Every round boots a guest, has four volumes grow, recorded, and kills
// QEMU; the next guest checks what the kill has left and some replays of each record.
//
// The window is the time from when a growth began until the superblock on the disk
// has the new size. Half of the replays are cut at a point within it, where there is
// one, the others anywhere. Kernel 6.1 refuses to mount an xfs whose log uses groups
// beyond the size in its superblock; newer ones recover it, unless a directory that
// leads into such a group was written before. Such a volume has "met the window". It
// is given to directvol rescue, and must then be as whole as any. Where a kernel
// mounts a volume whose log or journal holds a growth, the next growth may fail and
// damage it, or never return: ext4 on 6.1 and 7.3, xfs on 6.1.
//
// Settings of a run by hand, in the environment:
//
//	CUTS_WAY     who mounts and grows: agent (the default) or, without an agent, bare
//	             (mount(2) and the ioctl), and bare with one measure or both: freeze
//	             (FIFREEZE and FITHAW after each growth), remount (each mount is
//	             unmounted and made again), freeze+remount
//	CUTS_KERNEL  what guests boot: ordinary (the default) or newer, which make rescue
//	             makes
//	CUTS_SEED    chooses everything that the guest's own speed does not
//	CUTS_COUNT   how many cuts
//	CUTS_IMAGE   an image that was kept, for TestKeptImageMountsAndGrowsOn
//
// For example:
//
//	CUTS_WAY=bare CUTS_COUNT=50 go test -v -timeout 1h -run Twenty ./tests/cuts
//
// Only the way agent fails where something is lost. The others show what it is for:
// they count. A volume on which something failed is kept as it was after the cut, in
// build/cuts, as the same seed takes another course in time, and the failure says how
// to look at it again.
package cuts
