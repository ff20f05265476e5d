// Package logbuffer implements the agent's log: JSON objects, one per line, with the field names of
// Kata's agent. A logger writes to memory and never blocks. Readers, including the console, take
// the lines from memory at their own pace. A reader that is too slow, or starts late, gets a line
// with the number of lines that it has missed.
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

	// maxLine is the longest line that is kept, so that one line does not push out all the others.
	maxLine = 16 << 10

	// batchBytes is how much a reader takes at once. It is larger than maxLine.
	batchBytes = 32 << 10
)

// Buffer keeps the last lines of a log. It is safe for concurrent use.
type Buffer struct {
	formatter *logrus.JSONFormatter
	fields    plain

	mu      sync.Mutex
	lines   [][]byte // each ends with a newline
	bytes   int      // of lines
	first   uint64   // the number of lines[0], counted since the start
	readers map[*Reader]struct{}
	more    event // fired when there is another line
	idle    event // fired when a reader has written all lines, or has left
}

// event wakes all goroutines that wait for it. The buffer's lock guards it.
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

// Reader is a reader of a buffer, with its position.
type Reader struct {
	buffer  *Buffer
	next    uint64 // the number of the next line to take
	written uint64 // all lines before this one are written
}

// New makes log write JSON lines with these fields to a new buffer, and returns the buffer. The
// buffer has no readers yet.
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

// plain are the fields of each line. As a hook, plain adds them, and formats other values as a text
// log would: in JSON, a code would become its number.
type plain logrus.Fields

// Levels returns all levels.
func (plain) Levels() []logrus.Level { return logrus.AllLevels }

// Fire adds the fields to the entry, which is logrus's own copy. It never fails.
func (p plain) Fire(e *logrus.Entry) error {
	if e.Data == nil {
		e.Data = logrus.Fields{}
	}
	for key, value := range e.Data {
		if s, ok := value.(fmt.Stringer); ok {
			e.Data[key] = fmt.Sprint(s) // works for a nil Stringer, too
		}
	}
	maps.Copy(e.Data, p)
	return nil
}

// Write appends a line. It never blocks on a reader, and never fails.
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

// told returns a line of the buffer's own. It bypasses the logger, whose lock must be taken before
// the buffer's.
func (j *Buffer) told(fields logrus.Fields, message string) []byte {
	e := logrus.NewEntry(&logrus.Logger{}).WithFields(fields)
	e.Time, e.Level, e.Message = time.Now(), logrus.WarnLevel, message
	_ = j.fields.Fire(e)
	line, _ := j.formatter.Format(e) // fails only for values without a JSON form, not for numbers and text
	return line
}

// Reader returns a new reader at the start of the log. Flush waits for the reader until its CopyTo
// has returned.
func (j *Buffer) Reader() *Reader {
	j.mu.Lock()
	defer j.mu.Unlock()
	r := &Reader{buffer: j}
	j.readers[r] = struct{}{}
	return r
}

// CopyTo writes the kept lines and all later ones to w, until ctx ends or a write fails. A separate
// line gives the number of lines that the reader has missed. The caller must end a write that
// hangs. CopyTo must be called only once.
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

// take appends the next lines to batch. If there are none, it returns a channel that is closed when
// there is one. A call of take means that the lines of the previous call were written.
func (j *Buffer) take(r *Reader, batch []byte) ([]byte, <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	r.written = r.next
	if lost := int64(j.first - r.next); lost > 0 {
		batch = append(batch, j.told(logrus.Fields{"lost": lost}, "log lines are lost: the host did not read them in time")...)
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

// Flush waits until all current readers have written all current lines, or until ctx ends.
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
