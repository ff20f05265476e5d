// Package health watches mounted filesystems and turns the kernel's signs of a fault into a list of
// conditions. It knows where a filesystem is mounted and on which device, and nothing about volumes
// or storages.
//
// No single signal is sufficient. The table shows each signal for faults that were really provoked
// on Linux 6.1 (a: every write fails with EIO, under a writer; b: shutdown by ioctl; c: an error
// recorded by trigger_fs_error, with errors=continue and errors=remount-ro; d: the device unplugged
// under an idle mount):
//
//	signal                     ext4                                   xfs
//	mountinfo                  a b c d: plain rw                      a b d: plain rw
//	stat, open of the root     a b c d: fine                          a b: EIO; d: cached until a disk read
//	O_TMPFILE, write, fsync    a EROFS; b EIO; c fine, EROFS; d EROFS a b d: EIO
//	errors_count               a later; b 0; c 1; d later             keeps none
//	/dev/kmsg                  a b c; d at the first read             as ext4
//
// So the kernel's log is the earliest sign (within milliseconds), and the probe is the one that
// misses nothing. But the log is rate-limited for all devices together: on 6.1, xfs on one disk was
// seen to fail without a line half a second after ext4 on another disk had filled the log. In case
// a, the fault reaches the journal only with ext4's next commit, up to 5 s later. Until then only
// data is lost, errors_count is 0, and the filesystem takes writes as soon as the disk does. A
// watch therefore examines its filesystem when the log names its device, every few seconds while
// the device is written to, and less often when it is not.
//
// Events make a watch look at once, and are no conditions themselves: an error that a filesystem
// reports (FAN_FS_ERROR of fanotify: ext4 since Linux 5.16, xfs since 7.0; the health monitor of an
// xfs since 7.0), a change of its mount, and a device that is gone. Neither the mark of fanotify
// nor the health monitor holds a filesystem. An xfs whose log fails causes no event but the
// kernel's log, and an ext4 whose journal has aborted causes none while it is idle. An event during
// a pause is kept until its end.
//
// A watch reports only what was seen:
//
//	a watch reports that    when
//	the disk hangs          the kernel counts requests in flight, and none has ended for 3 s
//	the disk is slow        an examination has taken 5 s or more, and requests end; but not if 4 or more have ended
//	                        meanwhile, reads and writes in less than 250 ms each on average, and flushes in less than
//	                        1 s: then the guest is busy, and not its disk slow. It is slow all the same if none of the
//	                        kind that the examination waits for (any, or if it writes, a write, a discard or a flush)
//	                        has ended for 5 s
//	writes fail             a probe's own write has failed, but the filesystem has not shut down
//	it has shut down        stat of an xfs's root directory, which is in memory, returns EIO
//	it is read-only         a probe's write is refused, or the kernel has made it read-only by itself: an ext4 records an
//	                        error then, a btrfs (in case a) logs "forced readonly" and starts no transaction any more
//	a write or read failed  a line of the kernel itself, matched from its first word, reports it for this device
//	little is left          statfs shows less available space, or fewer inodes, than a setting asks for, and until
//	                        a quarter more than that is available
//	the disk was smaller    the kernel's log says so, or its size was read after a uevent, even if the disk has its
//	                        size again by the next examination (the kernel drops such lines if others come too fast;
//	                        then a disk that has its size again before its uevent is read is not noticed)
//
// The time that a caller waits proves nothing. A flush alone is not counted in flight: when writing
// stops, a read checks whether the device answers. While an examination, or the call that has
// paused the watch, may itself wait for a flush, the read has no thread of its own
// (blockdev.AskAside).
//
// The agent probes its own mounts by writing. For somebody else's mount, a watch uses the log, the
// counts, the superblock and stat, and keeps no file open that could make an unmount fail. A
// growth, a freeze, a flush and an unmount pause the watch, so that at most one thread per volume
// waits for its disk.
//
//	call    twice                late                 cut off                    concurrent with its opposite
//	Pause   waits for the first  the watch goes on    the watch goes on          Resume waits for Pause
//	Own     changes nothing      probes from then on  –                          no effect after End
//	Disown  changes nothing      a probe goes on      –                          the last of Own and Disown counts
//	Rest    changes nothing      –                    a probe in flight goes on  the last of Rest, Again and End counts
//	End     changes nothing      –                    a probe in flight goes on  Resume does nothing
//	Again   looks once more      –                    –                          the last of Rest, Again and End counts
package health
