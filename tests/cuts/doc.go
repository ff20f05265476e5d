// Package cuts holds the campaign of power cuts: the power of volumes is cut while they grow under
// their writers. Afterwards each volume must mount, contain every acknowledged block, grow again,
// and pass fsck without a message. TestTwentyCutsLoseNothing is the short form, in `make test`.
// `make test-long` runs TestCampaignOfCutsLosesNothing, over ext3, btrfs and a mapping too, which
// writes its results to build/cuts.md, and the tests with the newer kernel.
//
// There are two kinds of cut. In a kill, QEMU is killed at some moment: everything that QEMU had
// written is there, flushed or not, because the host's page cache survives. In a replay, the image
// is made from a record of all writes and flushes (tests/cuts/logwrites), like a disk whose own
// cache has lost its power: the image has every write up to the last flush before the point, and of
// the later writes none, some or all, torn at 4096 bytes. Discards change nothing in a replay. The
// image is as large as the disk was, because the host's growth is permanent. Every round boots a
// guest, grows four volumes with a record, and kills QEMU; the next guest checks the volumes after
// the kill and some replays of each record.
//
// The window is the time from the beginning of a growth until the superblock on the disk has the
// new size. Half of the replays are cut at a point inside a window, if there is one, the others
// anywhere. Kernel 6.1 refuses to mount an xfs whose log uses groups beyond the size in its
// superblock. Newer kernels recover such an xfs, unless a directory that leads into such a group
// was written earlier. A volume that is refused for this reason has "met the window". It is given
// to directvol rescue, and must then be as intact as any other. If a kernel mounts a volume whose
// log or journal contains a growth, the next growth may fail and damage the volume, or never
// return: ext4 on 6.1 and 7.3, xfs on 6.1.
//
// The matrix (matrix.go) is the other campaign: volumes of many formats grow without a record to a
// list of sizes. In each step QEMU is killed while some of the calls run, and the same calls are
// made again in the next guest. Then every volume must have the size and no recorded error, its
// fsck must be silent, and with the copies of an ext4's superblock e2fsck must find nothing wrong
// but counts. TestSameCallFinishesAGrowthThatAKillInterrupted has a few formats and sizes; `make
// test-long` runs TestEveryFormatGrowsToTwoTebibytesThroughKills. An ext4 without a journal is
// given to e2fsck after a kill, as its user must.
//
// Settings of a manual run, in the environment:
//
//	CUTS_WAY     who mounts and grows: agent (the default) or, without an agent, bare
//	             (mount(2) and the ioctl), and bare with one measure or both: freeze
//	             (FIFREEZE and FITHAW after each growth), remount (each mount is
//	             unmounted and made again), freeze+remount
//	CUTS_KERNEL  the guests' kernel: ordinary (the default), or newer, which
//	             `make rescue` fetches
//	CUTS_FORMATS the volumes' formats: usual (the default; ext4 and xfs), others (ext3 and
//	             btrfs), or mapped (ext4 on a linear mapping of its disk)
//	CUTS_SEED    chooses everything except what depends on the guest's speed
//	CUTS_COUNT   number of cuts
//	CUTS_IMAGE   a kept image, for TestKeptImageMountsAndGrowsOn
//
// For example:
//
//	CUTS_WAY=bare CUTS_COUNT=50 go test -v -timeout 1h -run Twenty ./tests/cuts
//
// Only the way agent fails if something is lost. The other ways only count the losses, to show the
// use of the agent's measures. The image of a failed volume is kept in build/cuts as the cut left
// it, because a second run with the same seed has another timing. The failure says how to check the
// image again.
package cuts
