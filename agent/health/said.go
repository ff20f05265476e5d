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
	// saidLines and saidBytes bound what is quoted of the kernel's log: the last lines, and of each the first bytes.
	saidLines = 3
	saidBytes = 200
)

// KernelLog is the kernel's log from a moment on.
type KernelLog struct{ file *os.File }

// OpenKernelLog begins at this moment. The caller closes the log. Where the log cannot be read, it says nothing.
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

// Close ends the log.
func (l *KernelLog) Close() {
	if l.file != nil {
		l.file.Close()
	}
}

// Words are Said as an error quotes it, also where that is nothing.
func (l *KernelLog) Words(about ...string) string {
	for _, name := range about {
		if said := l.Said(name); said != "" {
			return "the guest's kernel says: " + said
		}
	}
	return "the guest's kernel says nothing of it"
}

// Said quotes what the kernel has logged since about a block device, by its kernel's name, or a type of filesystem or a
// module, whose lines begin with its name: the last lines, or "".
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

// readKmsg calls each with every record that is there.
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
