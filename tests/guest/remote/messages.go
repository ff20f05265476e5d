package remote

import "syscall"

// Path names a file of the guest: the arguments of OpStat, OpStatFS, OpDeviceSize and OpSync.
type Path struct {
	Path string `json:"path"`
}

// Command is a program to run in the guest.
type Command struct {
	Argv  []string `json:"argv"`            // Argv[0] is a path: the image has no shell and no PATH worth the name
	Env   []string `json:"env,omitempty"`   // the whole environment; nil inherits the test guest's
	Stdin []byte   `json:"stdin,omitempty"` // at most MaxData
}

// Signal goes to every process of a program.
type Signal struct {
	Program string         `json:"program"` // its path
	Signal  syscall.Signal `json:"signal"`
}

// Processes are those that have got a Signal.
type Processes struct {
	IDs []int `json:"ids"`
}

// Threads asks for those of every process of a program.
type Threads struct {
	Program string `json:"program"` // its path
}

// ThreadStates are a program's threads, as the kernel sees them.
type ThreadStates struct {
	States []string `json:"states"` // a letter each, as proc(5) has it: D waits in the kernel for a disk, or for who does
}

// Waiting is how many of the threads wait for a disk.
func (t ThreadStates) Waiting() (n int) {
	for _, state := range t.States {
		if state == "D" {
			n++
		}
	}
	return n
}

// Exit is how a Command ended. Of each output the first MaxOutput bytes are kept.
type Exit struct {
	Code      int    `json:"code"`             // -1 when a signal ended it
	Signal    string `json:"signal,omitempty"` // that signal
	Stdout    []byte `json:"stdout,omitempty"`
	Stderr    []byte `json:"stderr,omitempty"`
	Truncated bool   `json:"truncated,omitempty"` // an output was longer than was kept
}

// ReadFile reads up to Length bytes (at most MaxData) from Offset on.
type ReadFile struct {
	Path   string `json:"path"`
	Offset int64  `json:"offset,omitempty"`
	Length int    `json:"length"`
}

// Data is what ReadFile read: fewer bytes than were asked for at the file's end only.
type Data struct {
	Data []byte `json:"data,omitempty"`
}

// WriteFile writes Data at Offset, into a file that is made if it is missing.
type WriteFile struct {
	Path     string `json:"path"`
	Offset   int64  `json:"offset,omitempty"`
	Data     []byte `json:"data,omitempty"`
	Truncate bool   `json:"truncate,omitempty"` // drop what the file held before
}

// Stat is stat(2)'s answer, with the kernel's own mode bits.
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

// StatFS is statfs(2)'s answer: counts of BlockSize bytes, and of inodes.
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

// ShutdownFS forces the filesystem that holds Path down, as if its device were gone, with the ioctl that ext4 and xfs share (XFS_IOC_GOINGDOWN, EXT4_IOC_SHUTDOWN).
// Only unmounting brings it back.
type ShutdownFS struct {
	Path  string `json:"path"`
	Flags uint32 `json:"flags"` // 0 flushes everything first, 1 the journal only, 2 nothing
}

// Grow makes the mounted filesystem that holds Path so many bytes large, by its kernel's ioctl and nothing else. A smaller size is refused.
type Grow struct {
	Path   string `json:"path"`
	FSType string `json:"fstype"` // ext4 or xfs
	Bytes  uint64 `json:"bytes"`
	// Settle, if it is set, is the block device that the filesystem lies on. The kernel calls that keep an xfs from being lost to a power cut after its growth
	// are made then, and timed with the ioctl: the superblock and the last group's header are read from the device before it, the label that it has is set
	// again behind it, the superblock is read once more, and the device is synced. ext4's ioctl settles by itself.
	Settle string `json:"settle,omitempty"`
}

// Freeze stops all writing to the filesystem that holds Path, which writes its log and its superblock out, and lets it go on at once (FIFREEZE, FITHAW).
type Freeze struct {
	Path string `json:"path"`
}

// Grown is how long the ioctl took, and what Settle asked for, by the guest's clock.
type Grown struct {
	Nanoseconds int64 `json:"nanoseconds"`
}

// WriteBlocks is what the checksummed writer writes: block after block, block i at i*BlockBytes, with content that Fill makes of Seed and i. A file that is there is
// emptied first. It ends where the next block would go beyond LimitBytes, when it is told to stop, or with the first error: it never tries again.
type WriteBlocks struct {
	Path       string `json:"path"`
	BlockBytes int    `json:"block_bytes,omitempty"` // 0: DefaultBlock; else a multiple of 512, at most MaxBlock
	Seed       uint64 `json:"seed"`
	LimitBytes uint64 `json:"limit_bytes,omitempty"` // 0: none
	Unsynced   bool   `json:"unsynced,omitempty"`    // write only, and sync nothing: what it acknowledges may be lost
	Detached   bool   `json:"detached,omitempty"`    // nothing tells it to stop, the connection's end neither: for a guest that cannot be reached any more
	Apart      bool   `json:"apart,omitempty"`       // Path is a directory, and block i a file Path/i/block of its own
}

// VerifyBlocks reads blocks From to From+Count-1 back, and ends early where the file does.
type VerifyBlocks struct {
	Path       string `json:"path"`
	BlockBytes int    `json:"block_bytes,omitempty"` // as written
	From       uint64 `json:"from,omitempty"`
	Count      uint64 `json:"count"`
	Apart      bool   `json:"apart,omitempty"` // as written: then it ends before the first block whose file is not there
}

// Block is the acknowledgement of one block. From the writer it says: fsync returned success for it. From the verifier: this is what was read, and Bytes is less than a
// block where the file ends inside it.
type Block struct {
	Index uint64 `json:"index"`
	Bytes int    `json:"bytes"`
	Sum   uint64 `json:"sum"` // Sum's of the block

	// Nanoseconds is how long the writer's write and fsync took, by the guest's clock.
	Nanoseconds int64 `json:"nanoseconds,omitempty"`
}

// DialVsock connects, from inside the guest, to a vsock address, sends Send, and reads until Await bytes have come or the other side has ended the connection.
type DialVsock struct {
	CID   uint32 `json:"cid"` // or OwnCID
	Port  uint32 `json:"port"`
	Send  []byte `json:"send,omitempty"`
	Await int    `json:"await"` // at most MaxData
}

// OwnCID stands for the guest's own address, wherever it is. As an address it leads nowhere (VMADDR_CID_HYPERVISOR of linux/vm_sockets.h).
const OwnCID = 0

// Dialed is what came back. It is shorter than was awaited where the other side ended the connection.
type Dialed struct {
	Data []byte `json:"data,omitempty"`
}
