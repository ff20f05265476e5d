package operation

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/directvol/directvol/tests/guest/remote"
)

// guest serves this process's own files over a unix socket and returns a client.
func guest(t *testing.T) *remote.Client {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "guest.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- Serve(l) }()
	t.Cleanup(func() { l.Close(); <-done })
	return remote.NewClient(func(ctx context.Context, port uint32) (net.Conn, error) {
		if port != remote.Port {
			t.Errorf("port dialled\nwant: %d\n got: %d", remote.Port, port)
		}
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	})
}

func TestExecReturnsCodeAndOutputs(t *testing.T) {
	c := guest(t)
	got, err := c.Exec(t.Context(), remote.Command{
		Argv: []string{"/bin/sh", "-c", `read line; echo "$line $WORD"; echo bad >&2; exit 3`}, Env: []string{"WORD=there"}, Stdin: []byte("hello\n"),
	})
	if err != nil {
		t.Fatal(err)
	}
	if got.Code != 3 || string(got.Stdout) != "hello there\n" || string(got.Stderr) != "bad\n" || got.Signal != "" || got.Truncated {
		t.Errorf("exit\nwant: 3, hello there, bad\n got: %+v", got)
	}
	got, err = c.Exec(t.Context(), remote.Command{Argv: []string{"/bin/sh", "-c", "kill -9 $$"}})
	if err != nil || got.Code != -1 || got.Signal != "killed" {
		t.Errorf("killed\nwant: -1, killed\n got: %+v, %v", got, err)
	}
}

func TestExecBoundsOutput(t *testing.T) {
	got, err := guest(t).Exec(t.Context(), remote.Command{Argv: []string{"/bin/sh", "-c", "head -c 3000000 /dev/zero"}})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Stdout) != remote.MaxOutput || !got.Truncated || got.Code != 0 {
		t.Errorf("output\nwant: %d bytes, truncated, code 0\n got: %d bytes, %v, code %d", remote.MaxOutput, len(got.Stdout), got.Truncated, got.Code)
	}
}

func TestExecEndsWithItsConnection(t *testing.T) {
	c := guest(t)
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := c.Exec(ctx, remote.Command{Argv: []string{"/bin/sh", "-c", `exec sleep 1000000 >"$0"`, fifo}})
		failed <- err
	}()
	held, err := os.Open(fifo) // returns when the program has opened its end, and reads EOF when the program has ended
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("error\nwant: %v\n got: %v", context.Canceled, err)
	}
	if n, err := held.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("the program wrote %d bytes, %v", n, err)
	}
}

func TestFilesAreReadAndWrittenInPlace(t *testing.T) {
	c, path := guest(t), filepath.Join(t.TempDir(), "deep", "file")
	if err := c.Mkdir(t.Context(), filepath.Dir(path), 0o750); err != nil {
		t.Fatal(err)
	}
	steps := errors.Join(
		c.WriteFile(t.Context(), path, []byte("a longer text")),
		c.WriteFile(t.Context(), path, []byte("0123456789")),
		c.WriteAt(t.Context(), path, 4, []byte("xy")),
		c.Sync(t.Context(), path))
	if steps != nil {
		t.Fatal(steps)
	}
	part, err := c.ReadAt(t.Context(), path, 3, 4)
	if err != nil || string(part) != "3xy6" {
		t.Errorf("part\nwant: 3xy6\n got: %q, %v", part, err)
	}
	whole, err := c.ReadFile(t.Context(), path)
	if err != nil || string(whole) != "0123xy6789" {
		t.Errorf("whole\nwant: 0123xy6789\n got: %q, %v", whole, err)
	}
	status, err := c.Stat(t.Context(), path)
	if err != nil || status.Size != 10 || status.Mode&syscall.S_IFMT != syscall.S_IFREG {
		t.Errorf("stat\nwant: a regular file of 10 bytes\n got: %+v, %v", status, err)
	}
	space, err := c.StatFS(t.Context(), path)
	if err != nil || space.BlockSize == 0 || space.Blocks < space.Available {
		t.Errorf("statfs\nwant: a block size, and no more available than there is\n got: %+v, %v", space, err)
	}
	mounts, err := c.ReadFile(t.Context(), "/proc/self/mountinfo")
	if err != nil || !bytes.Contains(mounts, []byte(" / ")) {
		t.Errorf("mountinfo: no root in %d bytes, %v", len(mounts), err)
	}
}

func TestErrnoCrossesTheWire(t *testing.T) {
	c, file := guest(t), filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	_, read := c.ReadFile(ctx, "/no/such")
	_, run := c.Exec(ctx, remote.Command{Argv: []string{"/no/such"}})
	_, size := c.DeviceSize(ctx, file)
	_, status := c.Stat(ctx, "/no/such")
	for name, test := range map[string]struct {
		err  error
		want syscall.Errno
		says string
	}{
		"read":        {read, syscall.ENOENT, "/no/such"},
		"exec":        {run, syscall.ENOENT, "/no/such"},
		"stat":        {status, syscall.ENOENT, "/no/such"},
		"device size": {size, syscall.ENOTTY, file},
		"mkdir":       {c.Mkdir(ctx, filepath.Join(file, "sub"), 0o755), syscall.ENOTDIR, file},
		"umount":      {c.Unmount(ctx, "/no/such", 0), syscall.ENOENT, "/no/such"},
		"mount":       {c.Mount(ctx, remote.Mount{Source: "none", Target: "/no/such", FSType: "tmpfs"}), syscall.ENOENT, "/no/such"},
		"freeze":      {c.Freeze(ctx, "/no/such"), syscall.ENOENT, "/no/such"},
		"shutdown":    {c.ShutdownFS(ctx, "/no/such", 2), syscall.ENOENT, "/no/such"},
	} {
		// Without privileges mount(2) and umount(2) are refused before they look at the path.
		if !errors.Is(test.err, test.want) && !errors.Is(test.err, syscall.EPERM) {
			t.Errorf("%s\nwant: %v\n got: %v", name, test.want, test.err)
		}
		if test.err == nil || !strings.Contains(test.err.Error(), test.says) {
			t.Errorf("%s: the error does not name %s: %v", name, test.says, test.err)
		}
	}
}

func TestBadRequestsAreRefused(t *testing.T) {
	for name, test := range map[string]struct{ line, want string }{
		"unknown operation": {`{"op":"dance"}`, `unknown operation "dance"`},
		"no JSON":           {`dance`, "receive the request"},
		"no arguments":      {`{"op":"stat"}`, "decode the arguments"},
		"other arguments":   {`{"op":"stat","args":[1]}`, "decode the arguments"},
		"too long a read":   {`{"op":"read-file","args":{"path":"/dev/zero","length":1000000000000}}`, "outside 0 to"},
		"negative read":     {`{"op":"read-file","args":{"path":"/dev/zero","length":-1}}`, "outside 0 to"},
		"odd block":         {`{"op":"write-blocks","args":{"path":"/no/such","block_bytes":1000}}`, "multiple of 512"},
		"huge block":        {`{"op":"verify-blocks","args":{"path":"/no/such","block_bytes":1073741824}}`, "multiple of 512"},
		"no program":        {`{"op":"exec","args":{}}`, "no program named"},
	} {
		t.Run(name, func(t *testing.T) {
			host, served := net.Pipe()
			defer host.Close()
			go serve(served)
			if _, err := host.Write([]byte(test.line + "\n")); err != nil {
				t.Fatal(err)
			}
			var reply remote.Reply
			if err := remote.NewLines(host).Receive(&reply); err != nil {
				t.Fatal(err)
			}
			if !reply.Done || reply.Error == nil || !strings.Contains(reply.Error.Message, test.want) {
				t.Errorf("reply\nwant: the last, with … %s …\n got: %+v %v", test.want, reply, reply.Error)
			}
		})
	}
}

func TestGrowRefusesAFilesystemItDoesNotKnow(t *testing.T) {
	_, err := guest(t).Grow(t.Context(), remote.Grow{Path: t.TempDir(), FSType: "tmpfs", Bytes: 1 << 30})
	if err == nil || !strings.Contains(err.Error(), "tmpfs") {
		t.Errorf("want an error that names tmpfs\n got: %v", err)
	}
}

func TestThreadsAreThoseOfTheProgram(t *testing.T) {
	c := guest(t)
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	// Other threads may begin or end meanwhile, and none of them waits for a disk for long.
	if got, err := c.Threads(t.Context(), program); err != nil || len(got.States) < len(tasks)/2 || got.Waiting() == len(got.States) || got.WakeUps == 0 {
		t.Errorf("threads\nwant: about %d\n got: %v, %v", len(tasks), got.States, err)
	}
	if _, err := c.Threads(t.Context(), "/nothing"); err == nil {
		t.Error("a program that nobody runs has threads")
	}
	states := remote.ThreadStates{States: []string{"S", "D", "R", "D"}}
	if states.Waiting() != 2 {
		t.Errorf("waiting\nwant: 2\n got: %d", states.Waiting())
	}
}
