package rescue

import (
	"bytes"
	"slices"
	"strings"
	"sync"
)

const (
	// maxLine and maxLines limit what is kept of a guest's console.
	maxLine  = 400
	maxLines = 40
)

// console keeps the guest kernel's messages about filesystems and drops the rest. An untrusted disk
// may cause many messages, so console keeps only the last lines.
type console struct {
	mu    sync.Mutex
	line  []byte
	lines []string
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for rest := p; len(rest) > 0; {
		part, after, ended := bytes.Cut(rest, []byte("\n"))
		c.line = append(c.line, part[:min(len(part), maxLine-len(c.line))]...)
		if ended {
			c.take()
		}
		rest = after
	}
	return len(p), nil
}

// subsystems are the beginnings of kernel messages about a filesystem or its disk.
var subsystems = []string{"XFS (vd", "EXT4-fs", "JBD2:", "I/O error, dev vd", "Buffer I/O error on dev"}

func (c *console) take() {
	text := strings.TrimSpace(printable(string(c.line)))
	c.line = c.line[:0]
	for _, words := range subsystems {
		if at := strings.Index(text, words); at >= 0 {
			c.lines = append(c.lines, text[at:])
			c.lines = c.lines[max(0, len(c.lines)-maxLines):]
			return
		}
	}
}

// said returns the kept lines. They are complete once the VM has ended.
func (c *console) said() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.lines)
}
