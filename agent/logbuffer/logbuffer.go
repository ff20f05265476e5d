// Package logbuffer is the agent's log: JSON objects, one a line, with the names
// that Kata's agent gives its fields. Whoever logs writes to memory and never
// waits; readers, the console among them, take the lines from there at their own
// pace. One that is too slow, or comes late, is told how many it has missed.
package logbuffer

import (
	"context"
	"fmt"
	"io"
	"maps"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
)

const (
	// KeptBytes is how much of the log is kept for readers.
	KeptBytes = 256 << 10

	// maxLine is the longest line that is kept: one alone must not push out all
	// the others.
	maxLine = 16 << 10

	// batchBytes is how much a reader takes at once. It is more than maxLine.
	batchBytes = 32 << 10
)

// Buffer keeps the last lines of a log. It is safe for concurrent use.
type Buffer struct {
	formatter *logrus.JSONFormatter
	fields    plain

	mu      sync.Mutex
	lines   [][]byte // each ends with a newline
	bytes   int      // of lines
	first   uint64   // the number of lines[0], since the start
	readers map[*Reader]struct{}
	more    event // there is another line
	idle    event // a reader has written all, or has left
}

// event wakes everybody who waits for it, under the buffer's lock.
type event struct{ next chan struct{} }

func (e *event) await() <-chan struct{} {
	if e.next == nil {
		e.next = make(chan struct{})
	}
	return e.next
}

func (e *event) fire() {
	if e.next != nil {
		close(e.next)
		e.next = nil
	}
}

// Reader is somebody who reads a buffer, and how far they have come.
type Reader struct {
	buffer  *Buffer
	next    uint64 // the number of the next line to take
	written uint64 // all lines before this one are written
}

// New makes log write JSON lines with these fields to a buffer that it returns.
// From then on log is the buffer's. Nobody reads yet.
func New(log *logrus.Logger, fields logrus.Fields) *Buffer {
	j := &Buffer{fields: plain(fields), readers: map[*Reader]struct{}{}}
	j.formatter = &logrus.JSONFormatter{
		TimestampFormat: time.RFC3339Nano, DisableHTMLEscape: true,
		FieldMap: logrus.FieldMap{logrus.FieldKeyTime: "ts"},
	}
	log.SetFormatter(j.formatter)
	log.AddHook(j.fields)
	log.SetOutput(j)
	return j
}

// plain are the fields of each line. As a hook it adds them, and has values
// written as a text log would write them: in JSON a code would be its number.
type plain logrus.Fields

// Levels are all.
func (plain) Levels() []logrus.Level { return logrus.AllLevels }

// Fire changes the entry, which is logrus's own copy, and never fails.
func (p plain) Fire(e *logrus.Entry) error {
	if e.Data == nil {
		e.Data = logrus.Fields{}
	}
	for key, value := range e.Data {
		if s, ok := value.(fmt.Stringer); ok {
			e.Data[key] = fmt.Sprint(s) // which survives a nil one
		}
	}
	maps.Copy(e.Data, p)
	return nil
}

// Write keeps a line. It never waits for a reader, and never fails.
func (j *Buffer) Write(line []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.keep(line)
	j.more.fire()
	return len(line), nil
}

func (j *Buffer) keep(line []byte) {
	if len(line) > maxLine {
		line = j.told(logrus.Fields{"bytes": len(line), "begins": string(line[:256])}, "a log line is too long and is not kept")
	}
	j.lines = append(j.lines, append([]byte(nil), line...))
	j.bytes += len(line)
	drop := 0
	for ; j.bytes > KeptBytes; drop++ {
		j.bytes -= len(j.lines[drop])
		j.lines[drop] = nil
	}
	j.lines = j.lines[drop:]
	j.first += uint64(drop)
}

// told returns a line of the buffer's own. It goes past the logger, whose lock
// is taken before ours.
func (j *Buffer) told(fields logrus.Fields, message string) []byte {
	e := logrus.NewEntry(&logrus.Logger{}).WithFields(fields)
	e.Time, e.Level, e.Message = time.Now(), logrus.WarnLevel, message
	_ = j.fields.Fire(e)
	line, _ := j.formatter.Format(e) // fails for values that JSON has no form for: not for numbers and text
	return line
}

// Reader returns a new reader, before the first line that was ever logged. Flush
// waits for it until its CopyTo has returned.
func (j *Buffer) Reader() *Reader {
	j.mu.Lock()
	defer j.mu.Unlock()
	r := &Reader{buffer: j}
	j.readers[r] = struct{}{}
	return r
}

// CopyTo writes the lines that are kept and all that follow to w, until ctx ends
// or a write fails. What the reader has missed is told in a line of its own. A
// write that hangs is the caller's to end. It is called once.
func (r *Reader) CopyTo(ctx context.Context, w io.Writer) error {
	defer r.buffer.leave(r)
	var batch []byte
	for {
		var more <-chan struct{}
		if batch, more = r.buffer.take(r, batch[:0]); len(batch) == 0 {
			select {
			case <-more:
				continue
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if _, err := w.Write(batch); err != nil {
			return fmt.Errorf("write the log: %w", err)
		}
	}
}

// take appends the next lines to batch. Where there are none it returns what
// tells of the next one. Whoever comes back has written what was taken before.
func (j *Buffer) take(r *Reader, batch []byte) ([]byte, <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	r.written = r.next
	if lost := int64(j.first - r.next); lost > 0 {
		batch = append(batch, j.told(logrus.Fields{"lost": lost}, "log lines are lost: nobody has read them in time")...)
		r.next = j.first
	}
	for _, line := range j.lines[r.next-j.first:] {
		if len(batch)+len(line) > batchBytes {
			break
		}
		batch = append(batch, line...)
		r.next++
	}
	if len(batch) > 0 {
		return batch, nil
	}
	j.idle.fire()
	return batch, j.more.await()
}

func (j *Buffer) leave(r *Reader) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.readers, r)
	j.idle.fire()
}

// Flush waits until those who read now have written all that is there now, or
// until ctx ends.
func (j *Buffer) Flush(ctx context.Context) {
	j.mu.Lock()
	end := j.first + uint64(len(j.lines))
	j.mu.Unlock()
	for {
		j.mu.Lock()
		behind := false
		for r := range j.readers {
			behind = behind || r.written < end
		}
		idle := j.idle.await()
		j.mu.Unlock()
		if !behind {
			return
		}
		select {
		case <-idle:
		case <-ctx.Done():
			return
		}
	}
}
