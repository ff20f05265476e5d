package main

import (
	"fmt"
	"math"
	"strings"
	"unicode/utf8"
)

// shown is a text in a row, with the times in seconds at which it appeared and disappeared. A text
// that stays to the end has the end +Inf.
type shown struct {
	row         int
	text        string
	from, until float64
}

// screen is a terminal with a fixed number of columns that never scrolls: it is as long as its
// output.
type screen struct {
	columns     int
	rows        [][]rune
	row, column int // the cursor's position
}

// play plays the pieces and returns the texts that each row has shown, in the order of time. It
// takes a picture of the screen at most once per every seconds, and one at the end.
func play(pieces []piece, columns int, every float64) ([]shown, error) {
	s := &screen{columns: columns, rows: [][]rune{nil}}
	var all []shown
	now := map[int]int{} // maps a row to its present text, as an index into all
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

// clearToEnd is the only escape sequence that this project's programs use (ECMA-48, 8.3.41).
const clearToEnd = "\x1b[K"

// write treats text as a terminal would. An unknown control character is an error, because the
// picture would then differ from a terminal's.
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
			return fmt.Errorf("an unknown control character in %.20q", text)
		default:
			s.put(c)
		}
		text = text[size:]
	}
	return nil
}

// put writes a character at the cursor. After a full row it continues in the next row.
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

// down moves the cursor one row down.
func (s *screen) down() {
	if s.row++; s.row == len(s.rows) {
		s.rows = append(s.rows, nil)
	}
}
