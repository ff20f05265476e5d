package state

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// contents are an example of an agent's contents.
type contents struct {
	Header
	Names []string `json:"names,omitempty"`

	more Rest
}

type known contents

func (c *contents) UnmarshalJSON(text []byte) (err error) {
	c.more, err = Split(text, (*known)(c))
	return err
}

func (c contents) MarshalJSON() ([]byte, error) { return Unite(known(c), c.more) }

func open(t *testing.T, path string) *File {
	t.Helper()
	file, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	return file
}

func save(f *File, names ...string) error {
	return f.Save(func() any { return contents{Header: f.Header(3), Names: names} })
}

func TestLastSavedStateIsRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	file := open(t, path)
	var none contents
	if found, err := file.Read(&none); found || err != nil {
		t.Errorf("before the first save\nwant nothing\ngot  %v, error %v", none, err)
	}
	if err := errors.Join(save(file, "a"), save(file, "a", "b"), file.Close()); err != nil {
		t.Fatal(err)
	}
	var got contents
	found, err := open(t, path).Read(&got)
	if want := []string{"a", "b"}; !found || err != nil || got.Version != 3 || !reflect.DeepEqual(got.Names, want) {
		t.Errorf("\nwant %v\ngot  %+v, found %v, error %v", want, got, found, err)
	}
}

// After Close, the next agent may have written the file.
func TestClosedFileIsNotWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	file := open(t, path)
	if err := errors.Join(save(file, "a"), file.Close(), save(open(t, path), "next")); err != nil {
		t.Fatal(err)
	}
	if err := save(file, "late"); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("want %v\ngot  %v", fs.ErrClosed, err)
	}
	if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), "next") {
		t.Errorf("want the next agent's\ngot  %s, error %v", text, err)
	}
}

func TestSaveThatFailsLeavesTheFileAsItWas(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	file := open(t, path)
	if err := save(file, "a"); err != nil {
		t.Fatal(err)
	}
	was, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := save(file, strings.Repeat("x", maxBytes)); err == nil {
		t.Error("more was written than is read back")
	}
	if err := os.MkdirAll(path+".new/full", 0o700); err != nil { // no file can replace the directory
		t.Fatal(err)
	}
	if err := save(file, "b"); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("want an error with %s\ngot  %v", path, err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != string(was) {
		t.Errorf("\nwant %s\ngot  %s, error %v", was, text, err)
	}
}

func TestStatePathThatIsNotAFileIsRefused(t *testing.T) {
	dir := t.TempDir()
	pipe, link := filepath.Join(dir, "pipe"), filepath.Join(dir, "link")
	if err := errors.Join(unix.Mkfifo(pipe, 0o600), os.Symlink("target", link)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, pipe, link, "/dev/null"} {
		if _, err := Open(path); err == nil || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("%s\nwant it refused\ngot  %v", path, err)
		}
	}
}

func TestStateOfARunningAgentIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	open(t, path)
	if _, err := Open(path); err == nil || !strings.Contains(err.Error(), "another agent") {
		t.Errorf("want it refused\ngot  %v", err)
	}
}

func TestStateIsReadByRootAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "directvol", "state.json")
	if err := save(open(t, path)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]fs.FileMode{path: 0o600, filepath.Dir(path): 0o700 | fs.ModeDir} {
		if info, err := os.Stat(path); err != nil || info.Mode() != want {
			t.Errorf("%s\nwant %v\ngot  %v, error %v", path, want, info.Mode(), err)
		}
	}
}

func TestInvalidContentsAreAnError(t *testing.T) {
	for name, text := range map[string]string{
		"empty": "", "text": "state", "cut": `{"version":1,"names":["`, "without a boot": `{"version":1}`, "without a version": `{"boot_id":"b"}`, "another type": `{"version":1,"boot_id":"b","names":7}`,
		"long": `{"version":1,"boot_id":"b"}` + strings.Repeat(" ", maxBytes),
	} {
		if found, err := parse([]byte(text), "b", &contents{}); found || err == nil {
			t.Errorf("%s: want an error\ngot  found %v", name, found)
		}
	}
	if found, err := parse([]byte(`{"version":1,"boot_id":"another"}`), "b", &contents{}); found || err != nil {
		t.Errorf("another boot\nwant nothing\ngot  found %v, error %v", found, err)
	}
}

func TestFirstCopyAsideStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	for _, text := range []string{"first", "second"} {
		if err := errors.Join(os.RemoveAll(path), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		file := open(t, path)
		aside, err := file.Aside()
		if err := errors.Join(err, file.Close()); err != nil {
			t.Fatal(err)
		}
		if kept, err := os.ReadFile(aside); err != nil || string(kept) != "first" {
			t.Errorf("after the %s\nwant first\ngot  %s, error %v", text, kept, err)
		}
	}
}

// FuzzContents reads any text, and checks that contents of this boot are written back completely,
// including fields that this version does not know.
func FuzzContents(f *testing.F) {
	f.Add([]byte(`{"version":1,"boot_id":"b","names":["a","b"]}`))
	f.Add([]byte(`{"version":7,"boot_id":"b","NAMES":["a"],"mood":{"is":"good"}}`))
	f.Add([]byte(`{"version":1,"boot_id":"other"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var was, again contents
		if found, err := parse(text, "b", &was); !found || err != nil {
			return
		}
		written, err := json.Marshal(was)
		if err != nil {
			t.Fatal(err)
		}
		if found, err := parse(written, "b", &again); !found || err != nil || again.Version != was.Version || len(again.Names) != len(was.Names) || len(again.more) != len(was.more) {
			t.Fatalf("\nwant %+v\ngot  %+v, found %v, error %v", was, again, found, err)
		}
	})
}
