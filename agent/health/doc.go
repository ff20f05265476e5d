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
// A watch reports only what was seen:
//
//	it is said that       when
//	the disk hangs        the kernel counts requests in flight, and none that has ended for 3 s
//	the disk is slow      an examination has taken 5 s or more, and requests end
//	writes fail           a probe's own write has, and the filesystem takes others
//	it has shut down      an xfs answers EIO to stat of its root, which it has in memory
//	it is read-only       a probe's write is refused, or the kernel made it so by itself
//	a write or read failed  the kernel's own log says it of this device, from its first word on
//	the disk was smaller  the kernel's log says so, also where it has its size again by the next examination
//	                        (newer kernels leave such lines out where others come too fast)
//
// The time that a caller waits proves nothing. A flush alone is not counted in flight: when writing
// stops, a read checks whether the device answers.
//
// The agent probes its own mounts by writing. For somebody else's mount, a watch uses the log, the
// counts, the superblock and stat, and keeps no file open that could make an unmount fail. A
// growth, a freeze, a flush and an unmount pause the watch, so that at most one thread per volume
// waits for its disk.
//
//	call             twice             late                  cut off             beside its opposite
//	Pause            waits for the first  the watch goes on    the watch goes on   Resume waits for it
//	Own              changes nothing   probes from then on   –                   after End nothing
//	Disown           changes nothing   a probe goes on       –                   the last one of it and Own counts
//	Rest             changes nothing   –                     a probe in flight goes on alone   Again and End count, the last one
//	End              changes nothing   –                     a probe in flight goes on alone   Resume does nothing
//	Again            looks once more   –                     –                  after End the last one counts
package health
