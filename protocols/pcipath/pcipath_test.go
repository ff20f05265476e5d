package pcipath

import (
	"reflect"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		text string
		want Path
		back string
	}{
		{"02", Path{Slots: []Slot{{Device: 2}}}, "02"},
		{"2/1", Path{Slots: []Slot{{Device: 2}, {Device: 1}}}, "02/01"},
		{"02/00/01", Path{Slots: []Slot{{Device: 2}, {}, {Device: 1}}}, "02/00/01"},
		{"1F.7/0a.0", Path{Slots: []Slot{{0x1f, 7}, {Device: 10}}}, "1f.7/0a"},
		{"20/00/01", Path{RootBus: 0x20, Slots: []Slot{{}, {Device: 1}}}, "20/00/01"},
		{"ff/1f.1/01/02", Path{RootBus: 0xff, Slots: []Slot{{0x1f, 1}, {Device: 1}, {Device: 2}}}, "ff/1f.1/01/02"},
	} {
		got, err := Parse(c.text)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("Parse(%q)\nwant %+v\ngot  %+v, %v", c.text, c.want, got, err)
		}
		if got.String() != c.back {
			t.Errorf("String of %q\nwant %s\ngot  %s", c.text, c.back, got)
		}
	}
}

func TestSlotIsNamedAsInSysfs(t *testing.T) {
	for want, slot := range map[string]Slot{"02.0": {Device: 2}, "1f.7": {0x1f, 7}} {
		if got := slot.String(); got != want {
			t.Errorf("%+v\nwant %s\ngot  %s", slot, want, got)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{
		"", "/", "02/", "/02", "02//01", "20", "20/01", "02/20/01", "20.0/00/01", "20/20/01",
		"002", "g0", "+1", "-1", "0x1", "02.", "02.8", "02.00", ".1", "02.0.0", "02:01", " 02", "02/../01", "0000:00:02.0",
		strings.Repeat("01/", MaxSegments) + "01", strings.Repeat("/", 1<<20),
	} {
		if got, err := Parse(text); err == nil {
			t.Errorf("Parse(%.80q)\nwant an error\ngot  %+v", text, got)
		} else if len(err.Error()) > 512 {
			t.Errorf("Parse(%.80q): the error has %d bytes", text, len(err.Error()))
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{"02", "02/01", "02/00/01", "20/00/01", "1f.7", "20/01", "", "/", "02.8", "ff/ff/ff"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := Parse(text)
		if err != nil {
			return
		}
		if len(p.Slots) == 0 || len(p.Slots) > MaxSegments {
			t.Errorf("Parse(%q) has %d slots", text, len(p.Slots))
		}
		for _, slot := range p.Slots {
			if slot.Device > maxSlot || slot.Function > maxFunction {
				t.Errorf("Parse(%q) has slot %+v", text, slot)
			}
		}
		if again, err := Parse(p.String()); err != nil || !reflect.DeepEqual(again, p) {
			t.Errorf("Parse(%q)\nwant %+v\ngot  %+v, %v", p.String(), p, again, err)
		}
	})
}
