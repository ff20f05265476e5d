package output

import (
	"fmt"
	"io"
	"strings"

	"golang.org/x/sys/unix"
)

// The size of a terminal that does not say its own.
const (
	usualColumns = 80
	usualRows    = 24
)

// terminalSize returns the size of the terminal that w writes to, and whether it is one.
func terminalSize(w io.Writer) (columns, rows int, ok bool) {
	columns, rows = usualColumns, usualRows
	file, ok := w.(interface{ Fd() uintptr }) // an *os.File or a wrapper of one
	if !ok {
		return columns, rows, false
	}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return columns, rows, false
	}
	if size.Col > 2 {
		columns = int(size.Col)
	}
	if size.Row > 2 {
		rows = int(size.Row)
	}
	return columns, rows, true
}

// Screen shows lines that change, in place on a terminal. The cursor stays below them, and no mode
// of the terminal is changed: a program may end at any time.
type Screen struct {
	w     io.Writer
	size  func() (columns, rows int)
	drawn int // lines of the last Draw
}

// NewScreen returns a Screen, or nil if w is no terminal.
func NewScreen(w io.Writer) *Screen {
	if _, _, ok := terminalSize(w); !ok {
		return nil
	}
	return &Screen{w: w, size: func() (columns, rows int) {
		columns, rows, _ = terminalSize(w)
		return columns, rows
	}}
}

// Columns returns how wide a line may be. The terminal may change its size between two calls.
func (s *Screen) Columns() int {
	columns, _ := s.size()
	return columns - 1
}

// Draw replaces the lines of the last Draw. Lines have no newlines. Draw cuts those that are too
// long, and says how many do not fit.
func (s *Screen) Draw(lines []string) error {
	columns, rows := s.size()
	if len(lines) >= rows {
		more := len(lines) - (rows - 2)
		lines = append(lines[:rows-2:rows-2], fmt.Sprintf("… and %d more lines", more))
	}
	var out strings.Builder
	if s.drawn > 0 {
		fmt.Fprintf(&out, "\x1b[%dA", min(s.drawn, rows-1)) // CUU, ECMA-48
	}
	for _, line := range lines {
		fmt.Fprintf(&out, "\r\x1b[K%s\n", cut(line, columns))
	}
	out.WriteString("\x1b[J") // the rest of longer lines before
	s.drawn = len(lines)
	_, err := io.WriteString(s.w, out.String())
	return err
}
