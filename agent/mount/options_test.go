package mount

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// none ignores no option.
func none(string) bool { return false }

// As in mount(8) and Kata's agent, the last one counts of two options that undo one another.
func TestOptionUndoesAnEarlierOne(t *testing.T) {
	for options, want := range map[string]uintptr{
		"nosuid,suid,nodev,dev,noexec,exec":             0,
		"sync,async,noatime,atime,nodiratime,diratime":  0,
		"relatime,norelatime,strictatime,nostrictatime": 0,
		"ro,rw":             0,
		"exec,noexec,rw,ro": unix.MS_NOEXEC | unix.MS_RDONLY,
	} {
		for _, all := range [][]string{{options}, strings.Split(options, ",")} {
			if got, _, err := ParseOptions(all, none); err != nil || got != (Options{Flags: want}) {
				t.Errorf("%q\nwant flags %#x and no data\ngot  %+v, error %v", all, want, got, err)
			}
		}
	}
}

// A remount starts from the flags of the existing mount.
func TestClearedFlagsAreReported(t *testing.T) {
	got, taken, err := ParseOptions([]string{"rw", "nodev", "exec,noexec", "size=1m"}, none)
	if want := (Options{Flags: unix.MS_NODEV | unix.MS_NOEXEC, Data: "size=1m"}); err != nil || got != want || taken != unix.MS_RDONLY {
		t.Errorf("\nwant %+v, taken %#x\ngot  %+v, taken %#x, error %v", want, unix.MS_RDONLY, got, taken, err)
	}
}

// An update replaces options of the same name. Data that does not fit with the options kept is
// refused. The root directory keeps its owner and mode.
func TestUpdateKeepsTheOptionsThatItDoesNotName(t *testing.T) {
	for _, c := range []struct{ data, update, want string }{
		{"", "", ""},
		{"size=1m", "", "size=1m"},
		{"size=1m,mode=700,size=2m", "size=3m", "mode=700,size=3m"},
		{"mpol=bind:0-3,5,huge=never", "mpol=local", "huge=never,mpol=local"},
		{"size=1m", "mpol=bind:0-3,5", "size=1m,mpol=bind:0-3,5"},
		{"size=1m,mode=700", "uid=5,mode=755,size=2m,gid=5", "mode=700,size=2m"},
		{"size=1m,inode64", "nr_blocks=9,inode64", "size=1m,nr_blocks=9,inode64"},
	} {
		before := Options{Flags: unix.MS_RDONLY, Data: c.data}
		got, err := before.Updated(Options{Flags: unix.MS_NOEXEC, Data: c.update})
		if want := (Options{Flags: unix.MS_NOEXEC, Data: c.want}); got != want || err != nil {
			t.Errorf("%s, then %s\nwant %+v\ngot  %+v, error %v", c.data, c.update, want, got, err)
		}
	}
	long := Options{Data: "huge=" + strings.Repeat("x", dataBytes-5)}
	if got, err := long.Updated(Options{Data: "size=1m"}); err == nil {
		t.Errorf("more than mount(2) takes\nwant it refused\ngot  %d bytes", len(got.Data))
	}
}

func TestDataThatTheKernelCannotTakeIsRefused(t *testing.T) {
	for _, data := range []string{strings.Repeat("x", dataBytes+1), "commit=\x00", "\xff"} {
		if got, _, err := ParseOptions([]string{data}, none); err == nil {
			t.Errorf("%.20q\nwant it refused\ngot  %.20q", data, got.Data)
		}
	}
}

// FuzzOptions checks that parsed options can be parsed again unchanged, and that they agree with a
// mount that shows them.
func FuzzOptions(f *testing.F) {
	f.Add("ro,nodev,size=4m,mode=0700")
	f.Add("rw,,ro,exec,data=journal,commit=30")
	f.Add("size=50%,logbsize=64k,=,==")
	f.Fuzz(func(t *testing.T, text string) {
		o, taken, err := ParseOptions([]string{text}, none)
		if err != nil {
			return
		}
		if o.Flags&taken != 0 {
			t.Errorf("%q: flags %#x are set and taken back", text, o.Flags&taken)
		}
		if again, _, err := ParseOptions([]string{o.Data}, none); err != nil || again != (Options{Data: o.Data}) {
			t.Errorf("%q\nwant %+v\ngot  %+v, error %v", text, o, again, err)
		}
		ofMount, ofSuper := o.flagNames()
		shown := &Info{FSType: "none", Options: strings.Join(ofMount, ","), VFSOptions: strings.Trim(strings.Join(ofSuper, ",")+","+o.Data, ",")}
		if missing, extra := o.Differences(shown); len(missing) > 0 || slices.ContainsFunc(extra, func(option string) bool { return !isShare(option) && option != "" }) {
			t.Errorf("%q, mounted so\nwant no differences\ngot  %q missing, %q extra", text, missing, extra)
		}
		if missing, _ := o.Differences(&Info{Options: "rw", VFSOptions: o.Data}); o.Flags == 0 && !slices.Contains(missing, "relatime") {
			t.Errorf("a mount without relatime agrees with %q", text)
		}
		for option := range strings.SplitSeq(o.Data, ",") {
			if once := canonical(option); canonical(once) != once {
				t.Errorf("option %q is written as %q and as %q", option, once, canonical(once))
			}
		}
	})
}
