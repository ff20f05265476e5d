package qemu

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/sirupsen/logrus"
	"github.com/sirupsen/logrus/hooks/test"
	"golang.org/x/sys/unix"
)

func TestSocketsAreTheirOwnersAlone(t *testing.T) {
	old := unix.Umask(0)
	vm, err := startPlayed(t, "serves", "serves", nil)
	unix.Umask(old)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]fs.FileMode{
		vm.cfg.Dir:             fs.ModeDir | 0o700,
		vm.path(monitorSocket): fs.ModeSocket | 0o600, // the backend makes the other sockets; its own test checks them
	} {
		info, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode(); got != want {
			t.Errorf("mode of %s\nwant %v\ngot  %v", path, want, got)
		}
	}
}

func TestOneOfSeveralStartsInADirectorySucceeds(t *testing.T) {
	t.Setenv(playQEMU, "serves")
	t.Setenv(playBackend, "serves")
	cfg := playedConfig(shortDir(t))
	var starts sync.WaitGroup
	vms := make(chan *VM, 4)
	for range cap(vms) {
		starts.Go(func() {
			vm, err := Start(limited(t), cfg)
			if err == nil {
				vms <- vm
			} else if !strings.Contains(err.Error(), "a VM runs in it") {
				t.Errorf("a refusal\nwant that a VM runs in the directory\ngot  %v", err)
			}
		})
	}
	starts.Wait()
	if len(vms) != 1 {
		t.Errorf("VMs in one directory\nwant 1\ngot  %d", len(vms))
	}
	for range len(vms) {
		vm := <-vms
		if err := vm.execute(limited(t), "query-status", nil, nil); err != nil {
			t.Errorf("the one that runs: %v", err)
		}
		kill(t, vm)
	}
	if _, err := os.Lstat(cfg.Dir); err == nil {
		t.Errorf("%s is left", cfg.Dir)
	}
}

// Between fork and exec, a process started by another goroutine has a copy of each descriptor.
func TestDirectoryThatIsReleasedIsLockedByNoCopyOfItsDescriptor(t *testing.T) {
	path := t.TempDir()
	must(t, os.Chmod(path, 0o700))
	d, err := claimDirectory(path)
	must(t, err)
	copied, err := unix.FcntlInt(d.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(copied)
	d.release(logrus.NewEntry(logrus.StandardLogger()))
	d, err = claimDirectory(path)
	if err != nil {
		t.Fatalf("a directory that nobody has any more: %v", err)
	}
	d.close()
}

// TestDirectoryOfARunningVMIsRefusedWithoutItsSockets: the lock decides, not the sockets.
func TestDirectoryOfARunningVMIsRefusedWithoutItsSockets(t *testing.T) {
	vm, err := startPlayed(t, "serves", "serves", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{monitorSocket, vhostSocket, vsockSocket} {
		os.Remove(vm.path(name)) // some are missing where the kernel does vsock
	}
	if other, err := Start(limited(t), vm.cfg); err == nil || !strings.Contains(err.Error(), vm.cfg.Dir+": a VM runs in it") {
		t.Errorf("a second VM in it\nwant a refusal\ngot  %v", err)
		if err == nil {
			kill(t, other)
		}
	}
	kill(t, vm)
	again, err := Start(limited(t), vm.cfg)
	if err != nil {
		t.Fatalf("after its end: %v", err)
	}
	kill(t, again)
}

func TestForeignFilesStayAndAreNamed(t *testing.T) {
	for _, name := range []string{monitorSocket, vhostSocket, vsockSocket} {
		foreign := ""
		vm, err := startPlayed(t, "serves", "serves", func(c *Config) {
			foreign = filepath.Join(c.Dir, name)
			if err := os.Mkdir(c.Dir, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(foreign, []byte("mine"), 0o600); err != nil {
				t.Fatal(err)
			}
		})
		if err == nil && vm.vsock.inKernel && name != monitorSocket {
			continue // this host needs no such socket
		}
		if err == nil || !strings.Contains(err.Error(), foreign) {
			t.Errorf("want it named: %s\ngot  %v", foreign, err)
		}
		if text, err := os.ReadFile(foreign); string(text) != "mine" {
			t.Errorf("%s is another now: %q, %v", foreign, text, err)
		}
	}
}

func TestFilesCreatedDuringTheRunStayAtTheEnd(t *testing.T) {
	log, said := test.NewNullLogger()
	vm, err := startPlayed(t, "serves", "serves", func(c *Config) { c.Log = logrus.NewEntry(log) })
	if err != nil {
		t.Fatal(err)
	}
	names := []string{monitorSocket, vhostSocket, vsockSocket, "notes"}
	for _, name := range names {
		os.Remove(vm.path(name))
		if err := os.WriteFile(vm.path(name), []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	kill(t, vm)
	for _, name := range names {
		if text, err := os.ReadFile(vm.path(name)); string(text) != "mine" {
			t.Errorf("%s is gone: %v", vm.path(name), err)
		}
	}
	for _, entry := range said.AllEntries() {
		if strings.Contains(entry.Message, vm.cfg.Dir) && strings.Contains(entry.Message, "notes") {
			return
		}
	}
	t.Errorf("nobody said that notes are left in %s", vm.cfg.Dir)
}

func TestDirectoryOfAnotherUserIsRefused(t *testing.T) {
	for name, spoil := range map[string]func(dir string) error{
		"others may enter": func(dir string) error { return os.Mkdir(dir, 0o755) },
		"a symlink":        func(dir string) error { return os.Symlink(t.TempDir(), dir) },
		"a file":           func(dir string) error { return os.WriteFile(dir, nil, 0o600) },
	} {
		_, err := startPlayed(t, "serves", "serves", func(c *Config) {
			if err := spoil(c.Dir); err != nil {
				t.Fatal(err)
			}
			if name == "others may enter" {
				if err := os.Chmod(c.Dir, 0o755); err != nil {
					t.Fatal(err)
				}
			}
		})
		if err == nil || !strings.Contains(err.Error(), "mode 0700") {
			t.Errorf("%s\nwant the mode that it is to have\ngot  %v", name, err)
		}
	}
}
