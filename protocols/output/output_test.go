package output

import (
	"bytes"
	"math"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestSizePrintsInTheUnitThatFits(t *testing.T) {
	for size, want := range map[Size]string{
		0: "0 bytes", 1023: "1023 bytes", 1 << 10: "1.0 KiB", 1536: "1.5 KiB", 1<<20 - 1: "1.0 MiB", 320 << 20: "320.0 MiB",
		1<<30 - 1: "1.0 GiB", 2 << 30: "2.0 GiB", 5 << 40: "5.0 TiB", 1 << 50: "1.0 PiB", math.MaxUint64: "16.0 EiB",
	} {
		if got := size.String(); got != want {
			t.Errorf("%d\nwant %s\ngot  %s", uint64(size), want, got)
		}
	}
}

func TestUsageIsReadable(t *testing.T) {
	for want, u := range map[string]Usage{
		"bytes: total 2.0 GiB, used 512.0 MiB, available 1.5 GiB": {"BYTES", 2 << 30, 1 << 29, 3 << 29},
		"inodes: total 65536, used 11, available 65525":           {"INODES", 65536, 11, 65525},
	} {
		if got := u.String(); got != want {
			t.Errorf("\nwant %s\ngot  %s", want, got)
		}
	}
}

func TestAnswerIsJSONOrText(t *testing.T) {
	var out bytes.Buffer
	if err := Answer(&out, true, Size(5), "x\n"); err != nil || out.String() != "5\n" {
		t.Errorf("JSON\nwant 5\ngot  %s(%v)", out.String(), err)
	}
	out.Reset()
	if err := Answer(&out, false, Size(5), Size(5).String()+"\n"); err != nil || out.String() != "5 bytes\n" {
		t.Errorf("text\nwant 5 bytes\ngot  %s(%v)", out.String(), err)
	}
}

// A log gets a line only now and then, however long a step takes. Before, ten minutes made six
// hundred lines.
func TestStepInALogIsALineNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		p := NewProgress(&log)
		s := p.Begin("fetch")
		s.Say("1.0 MiB")
		time.Sleep(25 * time.Second)
		if took := s.End("ok"); took != 25*time.Second {
			t.Errorf("took\nwant 25s\ngot  %v", took)
		}
		time.Sleep(time.Minute) // nothing more is written
		want := "fetch …\n  10.0 s  fetch …, 1.0 MiB\n  20.0 s  fetch …, 1.0 MiB\n  25.0 s  fetch: ok\n"
		if got := log.String(); got != want {
			t.Errorf("\nwant %q\ngot  %q", want, got)
		}
	})
}

func TestStepOnATerminalIsOneLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var screen bytes.Buffer
		p := &Progress{w: &screen, terminal: true, columns: 20}
		s := p.Begin("a name that is longer than that")
		time.Sleep(time.Second)
		s.End("ok")
		for line := range strings.SplitSeq(strings.TrimSuffix(screen.String(), "\n"), "\r\x1b[K") {
			if strings.Contains(line, "\n") || len([]rune(line)) >= 20 && !strings.HasSuffix(line, ": ok") {
				t.Errorf("a line of the step: %q", line)
			}
		}
		if got := strings.Count(screen.String(), "\r\x1b[K"); got < 4 {
			t.Errorf("the line in one second\nwant it rewritten 4 times\ngot  %d: %q", got, screen.String())
		}
	})
}

func TestNoProgressIsSilent(t *testing.T) {
	var p *Progress
	s := p.Begin("x")
	s.Say("y")
	p.Note("z")
	s.End("ok")
}

func TestFileIsNoTerminal(t *testing.T) {
	file, err := os.Create(t.TempDir() + "/log")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if NewProgress(file).terminal {
		t.Error("a file is taken for a terminal")
	}
}
