// Package health watches mounted filesystems and turns what the kernel shows
// of a fault into a list of conditions. It knows where a filesystem is mounted
// and on which device, and nothing of volumes or storages.
//
// No single signal tells everything. The table says what each showed for faults
// that were really provoked on Linux 6.1 (a: every write fails with EIO, under a
// writer; b: shutdown by ioctl; c: an error recorded by trigger_fs_error, with
// errors=continue and errors=remount-ro; d: the device unplugged under an idle
// mount):
//
//	signal                     ext4                                   xfs
//	mountinfo                  a b c d: plain rw                      a b d: plain rw
//	stat, open of the root     a b c d: fine                          a b: EIO; d: cached until a disk read
//	O_TMPFILE, write, fsync    a EROFS; b EIO; c fine, EROFS; d EROFS a b d: EIO
//	errors_count               a later; b 0; c 1; d later             keeps none
//	/dev/kmsg                  a b c; d at the first read             as ext4
//
// So the kernel's log is the earliest sign (within milliseconds) and the probe
// the one that misses nothing. But the log is rate-limited for all devices
// together: seen on 6.1, xfs on one disk failed without a line half a second
// after ext4 on another had filled the log. And in case a it takes until ext4's
// next commit, up to 5 s, for the fault to reach the journal: until then only
// data is lost, errors_count is 0 and the filesystem takes writes as soon as the
// disk does. A watch therefore examines its filesystem when the log names its
// device, every few seconds while the device is written to, and now and then
// when it is not.
//
// A watch says only what was seen:
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
// How long a caller waits is no sign of anything. A flush alone is not counted in flight:
// where writing stops, a read asks the device whether it answers.
//
// Our own mounts are probed by writing. A mount of somebody else's is watched by the
// log, the counts, its superblock and stat, with no file of it open that his unmount
// would meet. Growing, freezing, flushing and unmounting pause a watch: of all that
// concerns one volume a single thread at most waits for its disk.
//
//	call             twice             late                  cut off             beside its opposite
//	Pause            waits for the first  the watch goes on    the watch goes on   Resume waits for it
//	Own              changes nothing   probes from then on   –                   after End nothing
//	Disown           changes nothing   a probe goes on       –                   the last one of it and Own counts
//	Rest             changes nothing   –                     a probe in flight goes on alone   Again and End count, the last one
//	End              changes nothing   –                     a probe in flight goes on alone   Resume does nothing
//	Again            looks once more   –                     –                  after End the last one counts
package health
