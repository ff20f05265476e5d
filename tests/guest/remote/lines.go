package remote

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// ErrLineTooLong reports a line of more than MaxLine bytes. The connection cannot be used any
// further.
var ErrLineTooLong = fmt.Errorf("line longer than %d bytes", MaxLine)

// Lines sends and receives values as lines of JSON. One goroutine may send while another receives.
type Lines struct {
	r *bufio.Reader
	w io.Writer
}

// NewLines returns Lines over rw. The caller still closes rw.
func NewLines(rw io.ReadWriter) *Lines {
	return &Lines{r: bufio.NewReaderSize(rw, 64<<10), w: rw}
}

// Send writes v as one line, in one Write.
func (l *Lines) Send(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %T: %w", v, err)
	}
	if len(line) > MaxLine {
		return fmt.Errorf("encode %T: %w", v, ErrLineTooLong)
	}
	_, err = l.w.Write(append(line, '\n'))
	return err
}

// Receive reads one line into v. It returns io.EOF if the other side ended between two lines, and
// io.ErrUnexpectedEOF if it ended within a line.
func (l *Lines) Receive(v any) error {
	line, err := l.readLine()
	if err != nil {
		return err
	}
	if err := json.Unmarshal(line, v); err != nil {
		return fmt.Errorf("decode %T: %w", v, err)
	}
	return nil
}

// readLine returns the next line without its line end. It holds at most MaxLine bytes of the line
// and one buffer.
func (l *Lines) readLine() ([]byte, error) {
	var line []byte
	for {
		part, err := l.r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil && len(line)-1 <= MaxLine:
			return line[:len(line)-1], nil
		case len(line) > MaxLine:
			return nil, ErrLineTooLong
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(line) > 0:
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}
