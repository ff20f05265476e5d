package address

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func mustListen(t *testing.T, path string) *UnixSocket {
	t.Helper()
	s, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// leaveStale leaves a stale socket, as a killed process does.
func leaveStale(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
}

func TestListenUnixIsItsOwnersAlone(t *testing.T) {
	for _, umask := range []int{0, 0o022, 0o077} {
		path := filepath.Join(t.TempDir(), "s")
		old := unix.Umask(umask)
		mustListen(t, path)
		unix.Umask(old)
		info, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if want, got := fs.ModeSocket|0o600, info.Mode(); got != want {
			t.Errorf("umask %04o\nwant %v\ngot  %v", umask, want, got)
		}
	}
}

func TestListenUnixReplacesAStaleSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	leaveStale(t, path)
	leaveStale(t, path+newSuffix)
	s := mustListen(t, path)
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the socket in place of the stale one: %v", err)
	}
	conn.Close()
	s.Close()
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) > 0 {
		t.Errorf("after Close\nwant an empty folder\ngot  %v, %v", left, err)
	}
}

func TestListenUnixLeavesOtherFilesAlone(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"file":    func(path string) error { return os.WriteFile(path, []byte("mine"), 0o600) },
		"folder":  func(path string) error { return os.Mkdir(path, 0o700) },
		"pipe":    func(path string) error { return unix.Mkfifo(path, 0o600) },
		"symlink": func(path string) error { return os.Symlink("stale", path) },
	} {
		for suffix, want := range map[string]string{"": "not a socket", newSuffix: "not a socket", lockSuffix: "lock"} {
			dir := t.TempDir()
			leaveStale(t, filepath.Join(dir, "stale"))
			path := filepath.Join(dir, "s")
			foreign := path + suffix
			if err := make(foreign); err != nil {
				t.Fatal(err)
			}
			before, err := os.Lstat(foreign)
			if err != nil {
				t.Fatal(err)
			}
			s, err := ListenUnix(path)
			if err == nil {
				s.Close()
			}
			if err == nil || !strings.Contains(err.Error(), foreign) || !strings.Contains(err.Error(), want) {
				t.Errorf("%s at %s\nwant it named\ngot  %v", name, foreign, err)
			}
			if after, err := os.Lstat(foreign); err != nil || !os.SameFile(before, after) || after.Mode() != before.Mode() {
				t.Errorf("%s at %s is another now: %v", name, foreign, err)
			}
		}
	}
}

func TestListenUnixLeavesAListener(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for name, listen := range map[string]func() error{
		"ListenUnix": func() error { _, err := ListenUnix(path); return err },
		"ClaimUnix":  func() error { return ClaimUnix(path) },
	} {
		if err := listen(); !errors.Is(err, unix.EADDRINUSE) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s\nwant %v for %s\ngot  %v", name, unix.EADDRINUSE, path, err)
		}
	}
	// The listener did not notice the attempt: this connection is its first.
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	conn.Write([]byte("me"))
	conn.Close()
	first, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	b := make([]byte, 4)
	if n, _ := first.Read(b); string(b[:n]) != "me" {
		t.Errorf("the listener's first connection says\nwant %q\ngot  %q", "me", b[:n])
	}
}

func TestOneOfTwoListenersGetsThePath(t *testing.T) {
	for range 200 {
		path := filepath.Join(t.TempDir(), "s")
		leaveStale(t, path)
		var starts sync.WaitGroup
		got := make(chan *UnixSocket, 3)
		for range cap(got) {
			starts.Go(func() {
				if s, err := ListenUnix(path); err == nil {
					got <- s
				} else if !errors.Is(err, unix.EADDRINUSE) {
					t.Error(err)
				}
			})
		}
		starts.Wait()
		if len(got) != 1 {
			t.Fatalf("sockets that listen at one path\nwant 1\ngot  %d", len(got))
		}
		s := <-got
		info, err := os.Lstat(path)
		if err != nil || !os.SameFile(info, s.made) {
			t.Fatalf("the path is another's: %v", err)
		}
		s.Close()
	}
}

// A process that may not write the directory cannot prevent others from listening in it. A lock
// left by a killed process prevents nobody.
func TestLockOfAPathIsAFileBesideIt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	end, err := begin(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path + lockSuffix); err != nil {
		t.Error(err)
	}
	if _, err := ListenUnix(path); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("beside another\nwant %v\ngot  %v", unix.EADDRINUSE, err)
	}
	end()
	if err := os.WriteFile(path+lockSuffix, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	mustListen(t, path)
	if _, err := os.Lstat(path + lockSuffix); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the lock is left: %v", err)
	}
}

func TestRemoveLeavesAnotherFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	s := mustListen(t, path)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	mustListen(t, path)
	s.Close()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the one that came after was removed: %v", err)
	}
	conn.Close()
}

func TestListenUnixSaysWhatIsWrongWithAPath(t *testing.T) {
	dir := t.TempDir()
	for path, want := range map[string]string{
		"":                             "empty",
		filepath.Join(dir, "none/s"):   "create its folder first",
		"/" + strings.Repeat("x", 103): "104 bytes, the limit is 103",
	} {
		if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q\nwant %q\ngot  %v", path, want, err)
		}
	}
}

// ListenUnix and Parse must have the same limit: every valid path can be listened on, and both
// refuse one more byte with the same words.
func TestEachPathThatIsAnAddressCanBeListenedOn(t *testing.T) {
	dir := t.TempDir()
	fill := func(bytes int) string { return dir + "/" + strings.Repeat("x", bytes-len(dir)-1) }
	longest, err := Parse("unix://" + fill(MaxPath))
	if err != nil {
		t.Fatal(err)
	}
	mustListen(t, longest.Path)
	conn, err := longest.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	_, parsed := Parse("unix://" + fill(MaxPath+1))
	_, listened := ListenUnix(fill(MaxPath + 1))
	if parsed == nil || listened == nil || !strings.HasSuffix(parsed.Error(), listened.Error()) {
		t.Errorf("one byte more\nwant one text\ngot  %v, and %v", parsed, listened)
	}
}
