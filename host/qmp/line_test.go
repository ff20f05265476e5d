package qmp

import (
	"bufio"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"
)

const greetingLine = `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "(Debian)"}, "capabilities": ["oob"]}}`

var wireLines = []string{
	greetingLine,
	`{"return": {}, "id": 1}`,
	`{"return": [], "id": 18446744073709551615}`,
	`{"return": null, "id": 1}`,
	`{"id": 2, "error": {"class": "GenericError", "desc": "no"}}`,
	`{"error": {"class": "GenericError", "desc": "JSON parse error"}}`,
	`{"timestamp": {"seconds": 1700000000, "microseconds": 5}, "event": "DEVICE_DELETED", "data": {"device": "d", "path": "/p"}}`,
	`{"timestamp": {"seconds": -1, "microseconds": -1}, "event": "STOP"}`,
}

func TestParseLineTakesEachKind(t *testing.T) {
	for _, line := range wireLines {
		if _, err := parseLine([]byte(line)); err != nil {
			t.Errorf("%s: %v", line, err)
		}
	}
}

func TestParseLineRefusesOtherLines(t *testing.T) {
	for _, line := range []string{
		``, `{`, `{}`, `[]`, `7`, `"return"`, `null`, `{"id": 1}`, `{"return": {}, "id": -1}`, `{"return": {}, "id": "1"}`,
		`{"return": {}, "error": {}, "id": 1}`, `{"event": 3}`, `{"event": ""}`, `{"return": {}} {"return": {}}`, "\x00\xff", strings.Repeat("[", 20000),
	} {
		if _, err := parseLine([]byte(line)); err == nil {
			t.Errorf("%.40q: accepted", line)
		}
	}
}

func TestSplitLinesTakesNoHalfLine(t *testing.T) {
	s := bufio.NewScanner(strings.NewReader("one\r\n\r\ntwo\nthr"))
	s.Split(splitLines)
	var got []string
	for s.Scan() {
		got = append(got, s.Text())
	}
	if want := "one,two"; strings.Join(got, ",") != want {
		t.Errorf("lines:\nwant %s\ngot  %s", want, strings.Join(got, ","))
	}
	if !errors.Is(s.Err(), io.ErrUnexpectedEOF) {
		t.Errorf("end of a half line:\nwant %v\ngot  %v", io.ErrUnexpectedEOF, s.Err())
	}
}

func FuzzLine(f *testing.F) {
	for _, line := range wireLines {
		f.Add([]byte(line))
	}
	f.Add([]byte(`{"event": "X", "data": {"a": [[[[]]]]}}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		m, err := parseLine(line)
		if err != nil {
			return
		}
		// An accepted line must do no harm in the client, and must never reach a caller that did
		// not ask.
		answer := make(chan message, 1)
		c := &connection{lastID: new(atomic.Uint64), pending: map[uint64]chan message{7: answer}, publish: func(Event) {}}
		c.lastID.Store(7)
		if err := c.dispatch(&m); err == nil && len(answer) > 0 && (m.ID == nil || *m.ID != 7) {
			t.Errorf("%q answered command 7", line)
		}
	})
}
