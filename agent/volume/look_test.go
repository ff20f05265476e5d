package volume

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// answersDespiteServer checks that calls for a volume behind a server that hangs are answered, and
// that no more than most goroutines wait for the server. release makes the server answer; none of
// the checks depends on that.
func answersDespiteServer(t *testing.T, table *Table, dir string, release func(), most int) {
	t.Helper()
	guard := time.AfterFunc(time.Minute, release)
	const calls = 10
	answers := make(chan error, calls)
	for range calls {
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_, err := table.Stats(ctx, dir)
			answers <- err
		}()
	}
	for range calls {
		if err := <-answers; errkind.Of(err) != errkind.DeadlineExceeded {
			t.Errorf("want a DeadlineExceeded\ngot  %v", err)
		}
	}
	if !guard.Stop() {
		t.Error("somebody waited for the server")
	}
	if waiting := looking(); waiting > most {
		t.Errorf("goroutines that wait for the server\nwant %d at most\ngot  %d", most, waiting)
	}
}

// A volume is below a virtio-fs whose server hangs: the kernel asks that server each time a path
// leads through the virtio-fs. One thread waits for the server, whatever calls there are, and the
// volume stays known.
func TestVolumeBehindAHungServerIsAnswered(t *testing.T) {
	dir, server := mounttest.ServeFolder(t)
	mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, "xfs")), dir, "xfs", 0, "")
	table := newTable()
	if _, err := table.Stats(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if _, ok := table.StatsAtOnce(dir); ok {
		t.Error("it is measured by the goroutine that reads a connection, which may wait for the server")
	}
	known := table.at(dir)
	release := server.HoldLookups()
	defer release()
	answersDespiteServer(t, table, dir, release, 2) // for a call and for a watch
	if table.at(dir) != known {
		t.Error("the volume is forgotten, though it is mounted")
	}
	release()
	if _, err := table.Stats(t.Context(), dir); err != nil {
		t.Errorf("when it answers again: %v", err)
	}
	table.Forget(dir)
}

// looking returns how many goroutines are in mount.Look.
func looking() int {
	stacks := make([]byte, 1<<20)
	return strings.Count(string(stacks[:runtime.Stack(stacks, true)]), "mount.Look(")
}

// A path that leads through a link into a filesystem that hangs is refused because of the link, and
// does not block calls for other paths.
func TestPathThroughALinkIsNotFollowed(t *testing.T) {
	base := mounttest.Dir(t)
	hung, link := filepath.Join(base, "hung"), filepath.Join(base, "link")
	guard := time.AfterFunc(time.Minute, mounttest.Hang(t, hung)) // then all calls that wait for it fail
	if err := os.Symlink(hung, link); err != nil {
		t.Fatal(err)
	}
	table := newTable()
	for path, want := range map[string]errkind.Kind{
		filepath.Join(link, "x"): errkind.InvalidArgument, link: errkind.InvalidArgument, filepath.Join(base, "none"): errkind.NotFound,
	} {
		if _, err := table.Lookup(path); errkind.Of(err) != want {
			t.Errorf("%s\nwant kind %v\ngot  %v", path, want, err)
		}
	}
	if waiting := looking(); waiting > 0 {
		t.Errorf("goroutines that wait for the filesystem: %d", waiting)
	}
	if !guard.Stop() {
		t.Error("somebody waited for the filesystem")
	}
}

func TestFirstLinkOfAPathIsFound(t *testing.T) {
	base := mounttest.Dir(t)
	link := filepath.Join(base, "l")
	if err := os.Symlink("/nowhere", link); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		link: link, link + "/x/y": link, base: "", base + "/none/l": "", "/": "", base + "/ll": "",
	} {
		if got := linkIn(path); got != want {
			t.Errorf("%s\nwant %q\ngot  %q", path, want, got)
		}
	}
}

// A filesystem with a server that hangs is mounted over a folder above a known volume. The volume
// is then out of sight, and at most one thread waits for the server.
func TestVolumeThatAServerCoversLaterIsAnswered(t *testing.T) {
	above := filepath.Join(mounttest.Dir(t), "above")
	dir := filepath.Join(above, "volume")
	mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, "xfs")), dir, "xfs", 0, "")
	table := newTable()
	if _, err := table.Stats(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	known := table.at(dir)
	release := mounttest.Hang(t, above)
	answersDespiteServer(t, table, dir, release, 1)
	release()
	if _, err := table.Stats(t.Context(), dir); err != nil || table.at(dir) != known {
		t.Errorf("in sight again\nwant the volume as it was\ngot  error %v", err)
	}
	table.Forget(dir)
}

// A filesystem that hangs blocks calls for paths inside it, but not calls for the volume itself.
func TestVolumeIsFoundWhileAPathInsideItHangs(t *testing.T) {
	dir := filepath.Join(mounttest.Dir(t), "volume")
	guard := time.AfterFunc(time.Minute, mounttest.Hang(t, dir)) // then all calls that wait for it fail
	table := newTable()
	known, err := table.Lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := table.Lookup(filepath.Join(dir, "x")); errkind.Of(err) != errkind.DeadlineExceeded {
			t.Errorf("a path inside\nwant a DeadlineExceeded\ngot  %v", err)
		}
		if v, err := table.Lookup(dir); err != nil || v != known {
			t.Errorf("the volume, meanwhile\nwant it as it was\ngot  error %v", err)
		}
	}
	if !guard.Stop() {
		t.Error("somebody waited for the filesystem")
	}
}

// The path of a volume leads through a server that hangs. ResizeAtOnce leaves the volume to Resize
// if the server was there when the volume was found. If the server was mounted later, one call
// waits for it, and the others do not.
func TestGrowthAtOnceDoesNotWaitForAServerAbove(t *testing.T) {
	const calls = 10
	for name, above := range map[string]func(t *testing.T) (dir string, hang func() (release func())){
		"before": func(t *testing.T) (string, func() func()) {
			dir, server := mounttest.ServeFolder(t)
			return dir, server.HoldLookups
		},
		"later": func(t *testing.T) (string, func() func()) {
			above := filepath.Join(mounttest.Dir(t), "above")
			return filepath.Join(above, "volume"), func() func() { return mounttest.Hang(t, above) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir, hang := above(t)
			mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, "xfs")), dir, "xfs", 0, "")
			table := newTable()
			if _, err := table.Stats(t.Context(), dir); err != nil {
				t.Fatal(err)
			}
			defer table.Forget(dir)
			most := 0
			if name == "later" {
				most = 1
				mounttest.Await(t, "the watch waits for its next look", func() bool { return table.ResizeAtOnce(t.Context(), dir, 0) })
			}
			release := hang()
			defer release()
			guard := time.AfterFunc(30*time.Second, release) // then all calls that wait for the server return
			done := make(chan bool, calls)
			for range calls {
				go func() { done <- table.ResizeAtOnce(t.Context(), dir, 0) }()
			}
			for range calls - most {
				if <-done {
					t.Error("it has grown")
				}
			}
			if waiting := looking(); waiting > most {
				t.Errorf("goroutines that wait for the server\nwant %d at most\ngot  %d", most, waiting)
			}
			if !guard.Stop() {
				t.Errorf("more than %d of %d calls waited for the server", most, calls)
			}
			release()
			for range most {
				<-done
			}
		})
	}
}

// A guest that is so busy that nothing of the agent runs for a second finds the answer and the end
// of its time at once.
func TestLookThatHasAnAnswerIsNotLate(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for range 64 { // select would choose by chance
		answers := make(chan looked, 1)
		answers <- looked{err: os.ErrNotExist}
		if a, ok := await(over, answers); !ok || a.err != os.ErrNotExist {
			t.Fatalf("want the answer\ngot  %v, %v", a, ok)
		}
	}
	if _, ok := await(over, nil); ok {
		t.Error("want no answer")
	}
}
