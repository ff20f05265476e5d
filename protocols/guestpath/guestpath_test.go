package guestpath

import (
	"path"
	"strings"
	"testing"
)

func TestGuestPathsOfKata(t *testing.T) {
	for source, want := range map[string]string{
		"02/01":       Root + "/MDIvMDE=",
		"/dev/vdb":    Root + "/L2Rldi92ZGI=",
		"\xff\xfe>?~": Root + "/__4-P34=",
	} {
		got, err := Of(source)
		if err != nil || got != want {
			t.Errorf("Of(%q)\nwant %s\ngot  %s, %v", source, want, got, err)
		}
		if back, err := Source(want); err != nil || back != source {
			t.Errorf("Source(%q)\nwant %q\ngot  %q, %v", want, source, back, err)
		}
	}
}

func TestGuestPathIsAFileName(t *testing.T) {
	longest, err := Of(strings.Repeat("x", MaxSource))
	if err != nil {
		t.Fatal(err)
	}
	if got := len(path.Base(longest)); got > 255 {
		t.Errorf("name of the longest source\nwant at most 255 bytes\ngot  %d", got)
	}
	for _, source := range []string{"", strings.Repeat("x", MaxSource+1), "a\x00b"} {
		if got, err := Of(source); err == nil {
			t.Errorf("Of(%.20q)\nwant an error\ngot  %s", source, got)
		}
	}
}

func TestSourceRefusesPathsThatOfNeverReturns(t *testing.T) {
	for _, guest := range []string{
		"", "/", "MDIvMDE=", Root, Root + "/",
		Root + "/MDIvMDE",                       // no padding
		Root + "/MDIvMDF=",                      // nonzero bits after the end
		Root + "/MDIvMDE=/",                     // a trailing slash
		Root + "/../storage/MDIvMDE=",           // not a clean path
		Root + "/MDIv\nMDE=",                    // a line end, which the decoder skips
		Root + "/L2Rldi92ZGI+",                  // the alphabet of plain base64
		Root + "/AA==",                          // a zero byte
		Root + "/" + strings.Repeat("QUFB", 64), // longer than a file name
	} {
		if got, err := Source(guest); err == nil {
			t.Errorf("Source(%q)\nwant an error\ngot  %q", guest, got)
		}
	}
}

func FuzzSource(f *testing.F) {
	for _, seed := range []string{Root + "/MDIvMDE=", Root + "/", Root + "/MDIv\nMDE=", "/", Root + "/MDIvMDF="} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, guest string) {
		source, err := Source(guest)
		if err != nil {
			return
		}
		if back, err := Of(source); err != nil || back != guest {
			t.Errorf("Of(%q)\nwant %q\ngot  %q, %v", source, guest, back, err)
		}
	})
}

func FuzzOf(f *testing.F) {
	for _, seed := range []string{"02/01", "/dev/vdb", "", "\x00"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, source string) {
		guest, err := Of(source)
		if err != nil {
			return
		}
		if path.Dir(guest) != Root || path.Clean(guest) != guest {
			t.Errorf("Of(%q) = %q is not directly below %s", source, guest, Root)
		}
		if back, err := Source(guest); err != nil || back != source {
			t.Errorf("Source(%q)\nwant %q\ngot  %q, %v", guest, source, back, err)
		}
	})
}
