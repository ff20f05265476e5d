package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// piece is a piece of output that was written at one time.
type piece struct {
	at   float64 // in seconds since the start of the recording
	text string
}

// end returns the time of the last piece.
func end(pieces []piece) float64 {
	if len(pieces) == 0 {
		return 0
	}
	return pieces[len(pieces)-1].at
}

// cut splits a typescript at its recorded times. script adds a line of its own at the start and the
// end, which the timing file does not count. A character that two pieces share belongs to the later
// piece.
func cut(output []byte, times string) ([]piece, error) {
	if bytes.HasPrefix(output, []byte("Script started on ")) {
		_, output, _ = bytes.Cut(output, []byte("\n"))
	}
	var pieces []piece
	at, held := 0.0, ""
	for line := range strings.Lines(times) {
		var delay float64
		var size int
		if _, err := fmt.Sscanf(line, "%g %d\n", &delay, &size); err != nil {
			return nil, fmt.Errorf("a time is no `SECONDS BYTES`: %q", line)
		}
		if size < 0 || size > len(output) || !(delay >= 0) {
			return nil, fmt.Errorf("%q does not fit the %d bytes that are left", line, len(output))
		}
		at += delay
		text := held + string(output[:size])
		output = output[size:]
		whole := wholeCharacters(text)
		held = text[whole:]
		pieces = append(pieces, piece{at, text[:whole]})
	}
	if len(output) > 0 && !bytes.HasPrefix(bytes.TrimPrefix(output, []byte("\n")), []byte("Script done")) {
		return nil, fmt.Errorf("the times end %d bytes before the output does: was a disk full?", len(output))
	}
	return pieces, nil
}

// wholeCharacters returns the number of bytes of text without an incomplete character at its end.
func wholeCharacters(text string) int {
	for back := 1; back <= min(utf8.UTFMax, len(text)); back++ {
		if rest := text[len(text)-back:]; utf8.RuneStart(rest[0]) {
			if !utf8.FullRuneInString(rest) {
				return len(text) - back
			}
			break
		}
	}
	return len(text)
}

// writeCast writes the pieces as an asciicast.
func writeCast(w io.Writer, set settings, pieces []piece) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	header := map[string]any{"version": 2, "width": set.columns, "height": set.rows, "title": set.title}
	if err := encoder.Encode(header); err != nil {
		return err
	}
	for _, p := range pieces {
		if err := encoder.Encode([]any{p.at, "o", p.text}); err != nil {
			return err
		}
	}
	return nil
}
