package blockdev

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
)

// The device-mapper's requests and the layout of its messages (include/uapi/linux/dm-ioctl.h):
// struct dm_ioctl, and after it a struct dm_target_spec with its parameters for each target.
const (
	dmSuspend     = 0xc138fd06 // DM_DEV_SUSPEND; without dmSuspended it resumes
	dmTableLoad   = 0xc138fd09
	dmTableClear  = 0xc138fd0a
	dmTableStatus = 0xc138fd0c

	dmHeaderBytes = 312
	dmSpecBytes   = 40
	dmName        = 48 // char[128]
	dmUUID        = 176
	dmUUIDEnd     = 305
)

// Flags of struct dm_ioctl.
const (
	dmReadOnly    = 1 << 0
	dmSuspended   = 1 << 1
	dmStatusTable = 1 << 4
	dmBufferFull  = 1 << 8
	dmSkipLockFS  = 1 << 10
	dmSecureData  = 1 << 15 // the kernel wipes its copy of the message, which holds a key
)

// Limits of a table. A mapping of a volume has one target, or a few.
const (
	maxTargets    = 1024
	maxTableBytes = 1 << 20
)

// mapperControl is the device-mapper's node. devtmpfs makes it when the module is loaded.
const mapperControl = "/dev/mapper/control"

// target is one line of a mapping's table. Lengths are in sectors of 512 bytes.
type target struct {
	start, length uint64
	kind          string
	params        []byte // part of the answer: it may hold a key
}

// table is the active table of a mapping.
type table struct {
	name, uuid string
	flags      uint32
	targets    []target // without a gap, from sector 0 on
}

// sectors returns the length of the whole mapping.
func (t table) sectors() uint64 {
	if len(t.targets) == 0 {
		return 0
	}
	last := t.targets[len(t.targets)-1]
	return last.start + last.length
}

// withTable calls use with the active table of the mapping with a dev_t. The table may hold the key
// of an encrypted disk: it is wiped when use has returned, and no error quotes it.
func withTable(number uint64, use func(control *os.File, t table) error) error {
	control, err := openControl()
	if err != nil {
		return err
	}
	defer control.Close()
	for room := 16 << 10; room <= maxTableBytes; room *= 4 {
		full, err := withAnswer(control, number, room, use)
		if !full {
			return err
		}
	}
	return fmt.Errorf("device-mapper: a table is longer than %d bytes", maxTableBytes)
}

// withAnswer is withTable for an answer of at most room bytes. It returns true if that is not
// enough.
func withAnswer(control *os.File, number uint64, room int, use func(control *os.File, t table) error) (full bool, err error) {
	answer := dmRequest(number, dmStatusTable|dmSecureData, room)
	defer clear(answer)
	if err := dmCall(control, "DM_TABLE_STATUS", dmTableStatus, answer); err != nil {
		return false, err
	}
	if binary.LittleEndian.Uint32(answer[28:])&dmBufferFull != 0 {
		return true, nil
	}
	t, err := parseTable(answer)
	if err != nil {
		return false, err
	}
	return false, use(control, t)
}

func openControl() (*os.File, error) {
	control, err := os.OpenFile(mapperControl, os.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errkind.New(errkind.FailedPrecondition, "the device-mapper cannot be reached: mount devtmpfs at /dev, or make the node: %v", err)
	}
	return control, err
}

// dmRequest returns a message of a number of bytes about the mapping with a dev_t, without its
// data.
func dmRequest(number uint64, flags uint32, size int) []byte {
	b := make([]byte, size)
	binary.LittleEndian.PutUint32(b[0:], 4) // version 4.0.0, which every kernel has had since 2.6
	binary.LittleEndian.PutUint32(b[12:], uint32(size))
	binary.LittleEndian.PutUint32(b[16:], dmHeaderBytes)
	binary.LittleEndian.PutUint32(b[28:], flags)
	binary.LittleEndian.PutUint64(b[40:], number)
	return b
}

// dmCall sends a message, which the kernel overwrites with its answer. Only SIGKILL interrupts the
// call: any other signal, such as those of Go's scheduler, would make the kernel give up a resume
// while it waits for the requests in flight.
func dmCall(control *os.File, name string, request uintptr, message []byte) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, old unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^uint64(0)
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &old); err != nil {
		return os.NewSyscallError("rt_sigprocmask", err)
	}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, control.Fd(), request, uintptr(unsafe.Pointer(&message[0])))
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &old, nil); err != nil {
		return os.NewSyscallError("rt_sigprocmask", err)
	}
	if errno != 0 {
		return &fs.PathError{Op: "ioctl(" + name + ")", Path: control.Name(), Err: errno}
	}
	return nil
}

// parseTable parses the answer to DM_TABLE_STATUS with dmStatusTable. The parameters of the targets
// are parts of the answer.
func parseTable(answer []byte) (table, error) {
	refuse := func(fault string) (table, error) {
		return table{}, fmt.Errorf("device-mapper: the kernel's table has %s", fault)
	}
	if len(answer) < dmHeaderBytes {
		return refuse("no header")
	}
	number := func(at int) uint32 { return binary.LittleEndian.Uint32(answer[at:]) }
	size, start, count := uint64(number(12)), uint64(number(16)), number(20)
	if start < dmHeaderBytes || start > size || size > uint64(len(answer)) {
		return refuse("its data outside of the answer")
	}
	if count > maxTargets {
		return refuse(fmt.Sprintf("more than %d targets", maxTargets))
	}
	t := table{name: cString(answer[dmName:dmUUID]), uuid: cString(answer[dmUUID:dmUUIDEnd]), flags: number(28)}
	data, at := answer[start:size], uint64(0)
	for range count {
		if at > uint64(len(data)) || uint64(len(data))-at < dmSpecBytes {
			return refuse("a target outside of the answer")
		}
		spec := data[at:]
		one := target{start: binary.LittleEndian.Uint64(spec), length: binary.LittleEndian.Uint64(spec[8:]), kind: cString(spec[24:dmSpecBytes])}
		params, _, ended := bytes.Cut(spec[dmSpecBytes:], []byte{0})
		if !ended {
			return refuse("parameters without an end")
		}
		if one.params = params; one.start != t.sectors() || one.length == 0 || one.length > maxSectors-one.start {
			return refuse("targets that do not follow each other")
		}
		t.targets = append(t.targets, one)
		next := uint64(binary.LittleEndian.Uint32(spec[20:])) // from the first target on
		if next < at+dmSpecBytes+uint64(len(params)) {
			return refuse("targets in a loop")
		}
		at = next
	}
	return t, nil
}

// maxSectors is the end of the largest block device, in sectors (loff_t).
const maxSectors = 1 << 54

// cString returns the text before the first zero byte.
func cString(b []byte) string {
	text, _, _ := bytes.Cut(b, []byte{0})
	return string(text)
}

// loadMessage returns the DM_TABLE_LOAD of a table whose last target is sectors long. The caller
// wipes it.
func loadMessage(number uint64, t table, sectors uint64) []byte {
	size := dmHeaderBytes
	for _, one := range t.targets {
		size += specBytes(one)
	}
	b := dmRequest(number, dmSecureData|t.flags&dmReadOnly, size)
	binary.LittleEndian.PutUint32(b[20:], uint32(len(t.targets)))
	at := dmHeaderBytes
	for i, one := range t.targets {
		length := one.length
		if i == len(t.targets)-1 {
			length = sectors
		}
		spec := b[at : at+specBytes(one)]
		binary.LittleEndian.PutUint64(spec, one.start)
		binary.LittleEndian.PutUint64(spec[8:], length)
		binary.LittleEndian.PutUint32(spec[20:], uint32(len(spec))) // from this target on
		copy(spec[24:dmSpecBytes-1], one.kind)
		copy(spec[dmSpecBytes:], one.params)
		at += len(spec)
	}
	return b
}

// specBytes is the length of a target in a message: its parameters end with a zero, and the next
// target is aligned.
func specBytes(t target) int { return (dmSpecBytes + len(t.params) + 1 + 7) &^ 7 }

// lengthen makes the last target of a mapping sectors long, in two calls. DM_TABLE_LOAD prepares
// the new table beside the active one. DM_DEV_SUSPEND without dmSuspended then waits for the
// requests in flight, swaps the tables and goes on, all in one call of the kernel (do_resume in
// drivers/md/dm-ioctl.c): a process that is killed at any moment leaves the mapping running, with
// the old table or the new one. An explicit suspend before that would leave it suspended, with
// every request waiting, if the process were killed between the two.
//
//	cut off            the mapping runs with   the next call
//	before the load    the old table           begins anew
//	before the resume  the old table           loads again, which replaces the prepared table
//	in the resume      the old or the new      sees which, by the length
//	after the resume   the new table           finds nothing to do here
//
// The filesystem above is not frozen meanwhile, because that would first write out all of its data.
func lengthen(control *os.File, number uint64, t table, sectors uint64) error {
	load := loadMessage(number, t, sectors)
	defer clear(load)
	if err := dmCall(control, "DM_TABLE_LOAD", dmTableLoad, load); err != nil {
		return err
	}
	resume := func() error {
		return dmCall(control, "DM_DEV_SUSPEND", dmSuspend, dmRequest(number, dmSkipLockFS, dmHeaderBytes))
	}
	err := resume()
	if err != nil { // the first error counts
		_ = dmCall(control, "DM_TABLE_CLEAR", dmTableClear, dmRequest(number, 0, dmHeaderBytes))
		_ = resume() // with the old table: the kernel leaves the mapping suspended if it refuses the swap
	}
	return err
}
