package remote

import "syscall"

// Path names a file of the guest: the arguments of OpStat, OpStatFS, OpDeviceSize, OpDiskOffset and
// OpSync.
type Path struct {
	Path string `json:"path"`
}

// Command is a program to run in the guest.
type Command struct {
	Argv  []string `json:"argv"`            // Argv[0] is a path: the image has no shell and no useful PATH
	Env   []string `json:"env,omitempty"`   // the whole environment; nil inherits the test guest's
	Stdin []byte   `json:"stdin,omitempty"` // at most MaxData
}

// Signal is a signal to every process of a program.
type Signal struct {
	Program string         `json:"program"` // its path
	Signal  syscall.Signal `json:"signal"`
}

// Processes are the processes that received a Signal.
type Processes struct {
	IDs []int `json:"ids"`
}

// Threads asks for the threads of every process of a program.
type Threads struct {
	Program string `json:"program"` // its path
}

// ThreadStates are the states of a program's threads in the kernel.
type ThreadStates struct {
	States []string `json:"states"` // one letter each, see proc(5): D waits in the kernel for a disk, or for another thread that does
	Stacks []string `json:"stacks"` // of the same threads in the kernel, see proc(5); "" for one that is not there
	// WakeUps is how often the threads have waited for anything and gone on so far: the sum of
	// voluntary_ctxt_switches in /proc/PID/task/*/status, see proc(5).
	WakeUps uint64 `json:"wake_ups"`
}

// Waiting returns the number of threads that wait for a disk.
func (t ThreadStates) Waiting() (n int) {
	for _, state := range t.States {
		if state == "D" {
			n++
		}
	}
	return n
}

// Exit is the end of a Command. It keeps the first MaxOutput bytes of each output.
type Exit struct {
	Code      int    `json:"code"`             // -1 when a signal ended it
	Signal    string `json:"signal,omitempty"` // the signal's name
	Stdout    []byte `json:"stdout,omitempty"`
	Stderr    []byte `json:"stderr,omitempty"`
	Truncated bool   `json:"truncated,omitempty"` // an output was longer than its kept part
}

// ReadFile reads up to Length bytes (at most MaxData) from Offset on.
type ReadFile struct {
	Path   string `json:"path"`
	Offset int64  `json:"offset,omitempty"`
	Length int    `json:"length"`
}

// Data is the result of ReadFile. It has fewer bytes than requested only at the file's end.
type Data struct {
	Data []byte `json:"data,omitempty"`
}

// WriteFile writes Data at Offset, into a file that is made if it does not exist.
type WriteFile struct {
	Path     string `json:"path"`
	Offset   int64  `json:"offset,omitempty"`
	Data     []byte `json:"data,omitempty"`
	Truncate bool   `json:"truncate,omitempty"` // drop the file's old content
}

// Stat is the result of stat(2), with the kernel's own mode bits.
type Stat struct {
	Dev   uint64 `json:"dev"`
	Ino   uint64 `json:"ino"`
	Mode  uint32 `json:"mode"`
	Nlink uint64 `json:"nlink"`
	UID   uint32 `json:"uid"`
	GID   uint32 `json:"gid"`
	Rdev  uint64 `json:"rdev"`
	Size  int64  `json:"size"`
}

// StatFS is the result of statfs(2): counts of blocks of BlockSize bytes, and of inodes.
type StatFS struct {
	Type      int64  `json:"type"` // the filesystem's magic number
	BlockSize int64  `json:"block_size"`
	Blocks    uint64 `json:"blocks"`
	Free      uint64 `json:"free"`
	Available uint64 `json:"available"`
	Files     uint64 `json:"files"`
	FilesFree uint64 `json:"files_free"`
	Flags     int64  `json:"flags"`
}

// Size is a block device's size in bytes (BLKGETSIZE64).
type Size struct {
	Bytes uint64 `json:"bytes"`
}

// Offset is a position on a disk, in bytes from its beginning.
type Offset struct {
	Bytes uint64 `json:"bytes"`
}

// Mkdir makes a directory, and its parents.
type Mkdir struct {
	Path string `json:"path"`
	Mode uint32 `json:"mode"`
}

// Mount is mount(2). Target must exist.
type Mount struct {
	Source string  `json:"source"`
	Target string  `json:"target"`
	FSType string  `json:"fstype"`
	Flags  uintptr `json:"flags,omitempty"` // MS_*
	Data   string  `json:"data,omitempty"`
}

// Unmount is umount2(2).
type Unmount struct {
	Path  string `json:"path"`
	Flags int    `json:"flags,omitempty"` // MNT_* and UMOUNT_NOFOLLOW
}

// ShutdownFS shuts the filesystem that contains Path down, as if its device were gone, with the
// ioctl that ext4 and xfs share (XFS_IOC_GOINGDOWN, EXT4_IOC_SHUTDOWN). Only an unmount and a new
// mount bring it back.
type ShutdownFS struct {
	Path  string `json:"path"`
	Flags uint32 `json:"flags"` // 0 flushes everything first, 1 only the journal, 2 nothing
}

// Grow grows the mounted filesystem that contains Path to a size in bytes, with its kernel's ioctl
// only. A smaller size is refused.
type Grow struct {
	Path   string `json:"path"`
	FSType string `json:"fstype"` // ext4, xfs or btrfs
	Bytes  uint64 `json:"bytes"`
	// Settle, if set, is the block device of the filesystem. Grow then also makes the kernel calls
	// that protect a grown xfs from a power cut, and includes them in the measured time: it reads
	// the superblock and the last group's header from the device before the ioctl; afterwards it
	// sets the filesystem's label again to the same value, reads the superblock once more, and
	// syncs the device. The ioctl of ext4 needs no such calls.
	Settle string `json:"settle,omitempty"`
}

// Freeze freezes the filesystem that contains Path, which stops all writing and makes the
// filesystem write its log and superblock, and thaws it at once (FIFREEZE, FITHAW).
type Freeze struct {
	Path string `json:"path"`
}

// Grown is the duration of the ioctl and of the calls for Settle, by the guest's clock.
type Grown struct {
	Nanoseconds int64 `json:"nanoseconds"`
}

// WriteBlocks starts the checksummed writer, which writes block after block: block i at
// i*BlockBytes, with the content that Fill makes from Seed and i. An existing file is emptied
// first. The writer ends where the next block would exceed LimitBytes, when it is told to stop, or
// with the first error: it never retries.
type WriteBlocks struct {
	Path       string `json:"path"`
	BlockBytes int    `json:"block_bytes,omitempty"` // 0: DefaultBlock; else a multiple of 512, at most MaxBlock
	Seed       uint64 `json:"seed"`
	LimitBytes uint64 `json:"limit_bytes,omitempty"` // 0: none
	Unsynced   bool   `json:"unsynced,omitempty"`    // write and sync nothing: acknowledged blocks may be lost
	Detached   bool   `json:"detached,omitempty"`    // neither a stop nor the connection's end stops the writer: for a guest that becomes unreachable
	Apart      bool   `json:"apart,omitempty"`       // Path is a directory, and block i is a separate file Path/i/block
}

// VerifyBlocks reads blocks From to From+Count-1 back, and ends earlier at the end of the file.
type VerifyBlocks struct {
	Path       string `json:"path"`
	BlockBytes int    `json:"block_bytes,omitempty"` // as written
	From       uint64 `json:"from,omitempty"`
	Count      uint64 `json:"count"`
	Apart      bool   `json:"apart,omitempty"` // as written; then it ends before the first block without a file
}

// Block is the acknowledgement of one block. From the writer it means that fsync returned success
// for the block. From the verifier it is the block as read, and Bytes is less than a block if the
// file ends inside it.
type Block struct {
	Index uint64 `json:"index"`
	Bytes int    `json:"bytes"`
	Sum   uint64 `json:"sum"` // the Sum of the block

	// Nanoseconds is the duration of the writer's write and fsync, by the guest's clock.
	Nanoseconds int64 `json:"nanoseconds,omitempty"`
}

// Clock is the guest's time.
type Clock struct {
	UnixMilliseconds int64 `json:"unix_milliseconds"`
}

// DialVsock connects from inside the guest to a vsock address, sends Send, and reads until Await
// bytes have arrived or the other side has ended the connection.
type DialVsock struct {
	CID   uint32 `json:"cid"` // or OwnCID
	Port  uint32 `json:"port"`
	Send  []byte `json:"send,omitempty"`
	Await int    `json:"await"` // at most MaxData
}

// OwnCID stands for the guest's own address, whatever that is. As a real address it leads nowhere
// (VMADDR_CID_HYPERVISOR of linux/vm_sockets.h).
const OwnCID = 0

// Dialed is the received data. It is shorter than Await if the other side ended the connection.
type Dialed struct {
	Data []byte `json:"data,omitempty"`
}
