package vm

import (
	"bytes"
	"sync"
)

// consoleBytes is the length of the kept part of a guest's console.
const consoleBytes = 64 << 10

// console keeps the end of a guest's console output.
type console struct {
	mu   sync.Mutex
	text []byte
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.text = append(c.text, p...)
	if extra := len(c.text) - consoleBytes; extra > 0 {
		c.text = append(c.text[:0], c.text[extra:]...)
	}
	return len(p), nil
}

// tail returns the last lines.
func (c *console) tail(lines int) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	text := bytes.TrimRight(bytes.ReplaceAll(c.text, []byte("\r"), nil), "\n")
	at := len(text)
	for range lines {
		next := bytes.LastIndexByte(text[:at], '\n')
		if next < 0 {
			return string(text)
		}
		at = next
	}
	return string(text[at+1:])
}
