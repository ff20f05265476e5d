package health

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// saidLines and saidBytes bound how much of the kernel's log is quoted: the last lines, and the
	// first bytes of each.
	saidLines = 3
	saidBytes = 200
)

// KernelLog is the kernel's log from a point in time on.
type KernelLog struct{ file *os.File }

// OpenKernelLog starts at the current end of the log. The caller closes it. If the log cannot be
// read, the KernelLog is empty.
func OpenKernelLog() *KernelLog {
	file, err := os.OpenFile("/dev/kmsg", os.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err == nil {
		if _, err = file.Seek(0, io.SeekEnd); err == nil {
			return &KernelLog{file}
		}
		file.Close()
	}
	return &KernelLog{}
}

// Close closes the log.
func (l *KernelLog) Close() {
	if l.file != nil {
		l.file.Close()
	}
}

// Words returns the quote of Said for the first name that has one, in words for an error message.
func (l *KernelLog) Words(about ...string) string {
	for _, name := range about {
		if said := l.Said(name); said != "" {
			return "the guest's kernel says: " + said
		}
	}
	return "the guest's kernel has logged nothing about it"
}

// Said quotes the last lines that the kernel has logged since OpenKernelLog about name, or returns
// "". name is the kernel's name of a block device, or that of a filesystem type or module whose
// lines begin with its name.
func (l *KernelLog) Said(name string) string {
	if l.file == nil {
		return ""
	}
	var lines []string
	_ = readKmsg(l.file, func(record []byte) {
		message, kernels := messageOf(record)
		if kernels && (parseLine(message).device == name || bytes.HasPrefix(message, []byte(name+": "))) {
			lines = append(lines, string(message[:min(len(message), saidBytes)]))
		}
	})
	return strings.Join(lines[max(0, len(lines)-saidLines):], "; ")
}

// readKmsg calls each with every record that is available.
func readKmsg(file *os.File, each func(record []byte)) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	buf := make([]byte, kmsgRecord)
	var readErr error
	err = raw.Read(func(fd uintptr) bool {
		for {
			n, err := unix.Read(int(fd), buf)
			switch {
			case err == nil:
				each(buf[:n])
			case errors.Is(err, unix.EAGAIN):
				return true
			case !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.EINTR): // EPIPE: records were overwritten
				readErr = err
				return true
			}
		}
	})
	return errors.Join(err, readErr)
}
