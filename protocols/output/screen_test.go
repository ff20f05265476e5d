package output

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
)

func TestScreenReplacesItsLines(t *testing.T) {
	var terminal bytes.Buffer
	s := &Screen{w: &terminal, size: func() (int, int) { return 10, 5 }}
	for _, step := range []struct {
		lines []string
		want  string
	}{
		{[]string{"a", "b"}, "\r\x1b[Ka\n\r\x1b[Kb\n\x1b[J"},
		{[]string{"longer than ten"}, "\x1b[2A\r\x1b[Klonger t…\n\x1b[J"},
		{[]string{"1", "2", "3", "4"}, "\x1b[1A\r\x1b[K1\n\r\x1b[K2\n\r\x1b[K3\n\r\x1b[K4\n\x1b[J"},
		{[]string{"1", "2", "3", "4", "5", "6"}, "\x1b[4A\r\x1b[K1\n\r\x1b[K2\n\r\x1b[K3\n\r\x1b[K… and 3 …\n\x1b[J"},
		{nil, "\x1b[4A\x1b[J"},
		{[]string{"x"}, "\r\x1b[Kx\n\x1b[J"},
	} {
		terminal.Reset()
		if err := s.Draw(step.lines); err != nil || terminal.String() != step.want {
			t.Errorf("%q\nwant %q\ngot  %q, %v", step.lines, step.want, terminal.String(), err)
		}
	}
	if got := s.Columns(); got != 9 {
		t.Errorf("columns\nwant 9\ngot  %d", got)
	}
}

// Lines that were drawn on a terminal that is now lower have partly left it: the cursor cannot go
// back to them.
func TestScreenOfALowerTerminalIsNotLeft(t *testing.T) {
	var terminal bytes.Buffer
	rows := 10
	s := &Screen{w: &terminal, size: func() (int, int) { return 80, rows }}
	if err := s.Draw(strings.Split("123456789", "")); err != nil {
		t.Fatal(err)
	}
	terminal.Reset()
	rows = 4
	if err := s.Draw([]string{"x"}); err != nil || !strings.HasPrefix(terminal.String(), "\x1b[3A") {
		t.Errorf("want three lines up\ngot  %q, %v", terminal.String(), err)
	}
}

func TestFileHasNoScreen(t *testing.T) {
	file, err := os.Create(t.TempDir() + "/log")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if NewScreen(file) != nil || NewScreen(&bytes.Buffer{}) != nil {
		t.Error("a file is taken for a terminal")
	}
}

type broken struct{ error }

func (b broken) Write([]byte) (int, error) { return 0, b.error }

func TestScreenThatCannotBeWrittenIsAnError(t *testing.T) {
	gone := errors.New("gone")
	s := &Screen{w: broken{gone}, size: func() (int, int) { return 80, 24 }}
	if err := s.Draw([]string{"x"}); !errors.Is(err, gone) {
		t.Errorf("want %v\ngot  %v", gone, err)
	}
}
