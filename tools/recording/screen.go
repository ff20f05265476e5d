package main

import (
	"fmt"
	"math"
	"strings"
	"unicode/utf8"
)

// shown is a text of a row, and the seconds from which and until which it was there. What stays is there until +Inf.
type shown struct {
	row         int
	text        string
	from, until float64
}

// screen is a terminal of so many columns that is as long as its output: no row leaves it at the top.
type screen struct {
	columns     int
	rows        [][]rune
	row, column int // of the cursor
}

// play plays the pieces and returns what each row has shown, by time. It looks at the screen every so many seconds at most,
// and at its end.
func play(pieces []piece, columns int, every float64) ([]shown, error) {
	s := &screen{columns: columns, rows: [][]rune{nil}}
	var all []shown
	now := map[int]int{} // from a row to what it shows, as an index of all
	looked := math.Inf(-1)
	for i, p := range pieces {
		if err := s.write(p.text); err != nil {
			return nil, fmt.Errorf("after %.1f s: %w", p.at, err)
		}
		if p.at < looked+every && i < len(pieces)-1 {
			continue
		}
		looked = p.at
		for row, runes := range s.rows {
			text := strings.TrimRight(string(runes), " ")
			i, has := now[row]
			if has && all[i].text == text || !has && text == "" {
				continue
			}
			if has {
				all[i].until = p.at
				delete(now, row)
			}
			if text != "" {
				now[row] = len(all)
				all = append(all, shown{row, text, p.at, math.Inf(1)})
			}
		}
	}
	return all, nil
}

// clearToEnd is the one escape sequence that the programs here use (ECMA-48, 8.3.41).
const clearToEnd = "\x1b[K"

// write does what a terminal would do with text. A control character that it does not know is an error: the picture would
// show something else than a terminal does.
func (s *screen) write(text string) error {
	for text != "" {
		c, size := utf8.DecodeRuneInString(text)
		switch {
		case strings.HasPrefix(text, clearToEnd):
			size = len(clearToEnd)
			s.rows[s.row] = s.rows[s.row][:min(s.column, len(s.rows[s.row]))]
		case c == '\r':
			s.column = 0
		case c == '\n':
			s.down()
		case c < ' ' || c == '\x7f':
			return fmt.Errorf("a control character that is not known here, in %.20q", text)
		default:
			s.put(c)
		}
		text = text[size:]
	}
	return nil
}

// put writes a character at the cursor. A full row goes on in the next one.
func (s *screen) put(c rune) {
	if s.column == s.columns {
		s.down()
		s.column = 0
	}
	row := s.rows[s.row]
	for len(row) <= s.column {
		row = append(row, ' ')
	}
	row[s.column] = c
	s.rows[s.row] = row
	s.column++
}

// down moves the cursor a row down.
func (s *screen) down() {
	if s.row++; s.row == len(s.rows) {
		s.rows = append(s.rows, nil)
	}
}
