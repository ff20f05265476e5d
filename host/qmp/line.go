package qmp

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
)

// MaxLine is the greatest length of a received line, in bytes. QEMU's longest answers (all block
// nodes of a VM with some hundred disks) stay well under 1 MiB.
const MaxLine = 4 << 20

// Version is QEMU's version, as in the greeting and in query-version.
type Version struct {
	Major, Minor, Micro int
	// Package is the distributor's name for the build, including parentheses; often empty.
	Package string
}

// String returns the version as QEMU prints it, like "7.2.22 (Debian 1:7.2+dfsg-7)".
func (v Version) String() string {
	s := fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Micro)
	if v.Package != "" {
		s += " " + v.Package
	}
	return s
}

// Error is QEMU's answer to a command that failed.
type Error struct {
	// Class is one of QapiErrorClass: GenericError, CommandNotFound, DeviceNotActive,
	// DeviceNotFound, KVMMissingCap.
	Class string `json:"class"`
	// Desc is for people: QEMU does not promise a stable text.
	Desc string `json:"desc"`
}

// Error returns the class and the description.
func (e *Error) Error() string { return e.Class + ": " + e.Desc }

// DeviceNotFound is the class of the answer to a command that names a device QEMU does not have.
const DeviceNotFound = "DeviceNotFound"

// greeting is the first line of a connection.
type greeting struct {
	Version struct {
		QEMU struct {
			Major int `json:"major"`
			Minor int `json:"minor"`
			Micro int `json:"micro"`
		} `json:"qemu"`
		Package string `json:"package"`
	} `json:"version"`
}

// message is one received line. Exactly one of Greeting, Return, Error and Event is set.
type message struct {
	Greeting *greeting       `json:"QMP"`
	Return   json.RawMessage `json:"return"`
	Error    *Error          `json:"error"`
	Event    string          `json:"event"`
	ID       *uint64         `json:"id"`
	Data     json.RawMessage `json:"data"`
}

// parseLine parses one received line.
func parseLine(line []byte) (message, error) {
	var m message
	if err := json.Unmarshal(line, &m); err != nil {
		return message{}, fmt.Errorf("not a QMP line: %w: %s", err, excerpt(line))
	}
	kinds := 0
	for _, is := range []bool{m.Greeting != nil, m.Return != nil, m.Error != nil, m.Event != ""} {
		if is {
			kinds++
		}
	}
	if kinds != 1 {
		return message{}, fmt.Errorf("not a QMP line: want one of QMP, return, error and event, got %d: %s", kinds, excerpt(line))
	}
	return m, nil
}

// excerpt quotes the beginning of a line for an error.
func excerpt(line []byte) string {
	const most = 80
	if len(line) > most {
		return fmt.Sprintf("%q… (%d bytes)", line[:most], len(line))
	}
	return fmt.Sprintf("%q", line)
}

// errTruncated means that a connection ended in the middle of a line.
var errTruncated = fmt.Errorf("line cut short: %w", io.ErrUnexpectedEOF)

// splitLines is a bufio.SplitFunc for lines that end in a newline. Unlike bufio.ScanLines it skips
// empty lines and does not return an incomplete line at the end. It returns empty lines together
// with the line after them: if a call returned no token, bufio.Scanner would read on, and would
// delay a line that has already arrived.
func splitLines(data []byte, atEOF bool) (advance int, token []byte, err error) {
	for {
		end := bytes.IndexByte(data[advance:], '\n')
		if end < 0 {
			break
		}
		line := bytes.TrimSpace(data[advance : advance+end])
		advance += end + 1
		if len(line) > 0 {
			return advance, line, nil
		}
	}
	if atEOF && len(bytes.TrimSpace(data[advance:])) > 0 {
		return 0, nil, errTruncated
	}
	return advance, nil, nil
}
