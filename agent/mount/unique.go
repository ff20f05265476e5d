package mount

import (
	"encoding/binary"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From the kernel's include/uapi/linux/mount.h.
const (
	mntIDReqSize     = 24                 // MNT_ID_REQ_SIZE_VER0: {u32 size, u32 spare, u64 mnt_id, u64 param}
	listAll          = 0xffffffffffffffff // LSMT_ROOT
	statmountMntInfo = 0x2                // STATMOUNT_MNT_BASIC
	statmountBytes   = 512                // struct statmount, before its strings
	oldIDAt          = 56                 // mnt_id_old, after mnt_id and mnt_parent_id
	listStep         = 256                // mounts per call
)

// uniques returns the never reused number of each mount, by its number in mountinfo. The result is
// empty if the kernel has no such numbers. It lists the kernel's mounts instead of examining their
// roots, because a filesystem may hang or be shut down.
func uniques() map[int]uint64 {
	found := map[int]uint64{}
	var ids [listStep]uint64
	for last := uint64(0); ; {
		n, err := listmount(last, ids[:])
		if err != nil {
			return found
		}
		for _, unique := range ids[:n] {
			if old, err := oldID(unique); err == nil {
				found[old] = unique
			}
		}
		if n < len(ids) {
			return found
		}
		last = ids[n-1]
	}
}

type mntIDReq struct {
	size, spare uint32
	id, param   uint64
}

// listmount is listmount(2): it returns the mounts after last, in order of creation.
func listmount(last uint64, ids []uint64) (int, error) {
	request := mntIDReq{size: mntIDReqSize, id: listAll, param: last}
	n, _, errno := unix.Syscall6(unix.SYS_LISTMOUNT, uintptr(unsafe.Pointer(&request)), uintptr(unsafe.Pointer(&ids[0])), uintptr(len(ids)), 0, 0, 0)
	if errno != 0 {
		return 0, os.NewSyscallError("listmount", errno)
	}
	return min(int(n), len(ids)), nil
}

// oldID returns a mount's number in mountinfo, by statmount(2).
func oldID(unique uint64) (int, error) {
	request := mntIDReq{size: mntIDReqSize, id: unique, param: statmountMntInfo}
	var answer [statmountBytes]byte
	_, _, errno := unix.Syscall6(unix.SYS_STATMOUNT, uintptr(unsafe.Pointer(&request)), uintptr(unsafe.Pointer(&answer[0])), uintptr(len(answer)), 0, 0, 0)
	if errno != 0 {
		return 0, os.NewSyscallError("statmount", errno)
	}
	return int(binary.NativeEndian.Uint32(answer[oldIDAt:])), nil
}
