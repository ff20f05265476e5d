//go:build long

package service

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// The agent's packages in the guest: the one that is installed, and the same with a higher version.
const (
	agentPackage = "/root/agent.deb"
	newerPackage = "/root/newer.deb"
)

// installPackages installs the packages of make dist in a Debian that is not running.
func installPackages(t *testing.T, root string) {
	t.Helper()
	agent := distPackage(t, "directvol-agent")
	vmtest.Must(t, copyFile(root+agentPackage, agent))
	makeNewer(t, root+newerPackage, agent)
	vmtest.Must(t, copyFile(filepath.Join(root, "root/host.deb"), distPackage(t, "directvol")))
	command(t, "chroot", root, "dpkg", "--install", agentPackage, "/root/host.deb")
	for _, program := range []string{"directvol", "directvol-rootfs", "agent-ctl"} {
		command(t, "chroot", root, program, "--version")
	}
}

// distPackage returns the path of a package of make dist.
func distPackage(t *testing.T, name string) string {
	t.Helper()
	pattern := filepath.Join(found(t).Dir, "dist", name+"_*.deb")
	found, err := filepath.Glob(pattern)
	vmtest.Must(t, err)
	if len(found) != 1 {
		t.Fatalf("%s: %d packages, want one: run make dist", pattern, len(found))
	}
	return found[0]
}

// makeNewer makes a package with the same files and a higher version.
func makeNewer(t *testing.T, newer, deb string) {
	t.Helper()
	files := filepath.Join(t.TempDir(), "newer")
	command(t, "dpkg-deb", "--raw-extract", deb, files)
	control := filepath.Join(files, "DEBIAN/control")
	fields, err := os.ReadFile(control)
	vmtest.Must(t, err)
	vmtest.Must(t, os.WriteFile(control, bytes.Replace(fields, []byte("\nVersion: "), []byte("\nVersion: 9999+"), 1), 0o644))
	command(t, "dpkg-deb", "--build", "--root-owner-group", files, newer)
}

// dpkg runs dpkg in the guest.
func dpkg(t *testing.T, s daemon, args ...string) {
	t.Helper()
	exit, err := s.Remote.Exec(vmtest.Within(t, vmtest.JobLimit), remote.Command{Argv: append([]string{"/usr/bin/dpkg"}, args...)})
	vmtest.Must(t, err)
	if exit.Code != 0 {
		t.Fatalf("dpkg %s: exit %d\n%s%s", strings.Join(args, " "), exit.Code, exit.Stdout, exit.Stderr)
	}
}

// upgraded installs a newer package while a volume is written to: the new agent has taken over when
// dpkg ends.
func upgraded(t *testing.T, s daemon) {
	v, w := written(t, s, "upgraded")
	before := mainPID(t, s)
	dpkg(t, s, "--install", newerPackage)
	after := mainPID(t, s)
	if after == before || after == "0" {
		t.Errorf("the agent's process\nwant another than %s\ngot  %s", before, after)
	}
	if said := systemctl(t, s, "show", "directvol-agent.service", "--property=ActiveState,NeedDaemonReload"); !strings.Contains(said, "ActiveState=active") || !strings.Contains(said, "NeedDaemonReload=no") {
		t.Errorf("systemctl show\nwant active, and no reload needed\ngot  %s", said)
	}
	letGo(t, s, v, w)
}

// removedAndInstalled removes the package while a volume is mounted. The volume stays, and the
// agent that is installed afterwards knows who holds it.
func removedAndInstalled(t *testing.T, s daemon) {
	v, w := written(t, s, "removed")
	before := mainPID(t, s)
	dpkg(t, s, "--remove", "directvol-agent")
	exit, err := s.Remote.Exec(vmtest.Within(t, vmtest.JobLimit), remote.Command{Argv: []string{"/usr/bin/systemctl", "show", "directvol-agent.service", "--property=LoadState,ActiveState,UnitFileState"}})
	vmtest.Must(t, err)
	if got := string(exit.Stdout); !strings.Contains(got, "ActiveState=inactive") {
		t.Errorf("systemctl show of the removed unit\nwant inactive\ngot  %s", got)
	}
	if _, err := s.Remote.Stat(vmtest.Limited(t), "/proc/"+before); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the removed agent\nwant its process ended\ngot  process %s, error %v", before, err)
	}
	if _, err := s.Remote.Stat(vmtest.Limited(t), "/etc/systemd/system/multi-user.target.wants/directvol-agent.service"); !errors.Is(err, fs.ErrNotExist) {
		t.Error("the removed unit is still enabled")
	}
	if !vmtest.IsMounted(t, s.Guest, v.GuestPath) {
		t.Fatal("it was unmounted with the package")
	}
	dpkg(t, s, "--install", agentPackage)
	systemctl(t, s, "enable", "--now", "directvol-agent.service")
	letGo(t, s, v, w)
}

// written mounts a new volume and starts a writer of it, which ends before the volume is full,
// however long dpkg takes.
func written(t *testing.T, s daemon, id string) (*vm.Volume, *remote.Writer) {
	t.Helper()
	v := newVolume(t, s.Guest, id, "ext4")
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	w, err := v.StartWriter(vmtest.Within(t, vmtest.JobLimit), 64*miB)
	vmtest.Must(t, err)
	return v, w
}

// letGo awaits the end of a volume's writer, writes some more, and unmounts the volume: its holder
// must be known, and every block that was written must be there.
func letGo(t *testing.T, s daemon, v *vm.Volume, w *remote.Writer) {
	t.Helper()
	path := v.GuestPath
	if !vmtest.IsMounted(t, s.Guest, path) {
		t.Fatal("it is not mounted any more")
	}
	more, err := v.StartWriter(vmtest.Within(t, vmtest.JobLimit), 4*miB)
	vmtest.Must(t, err)
	vmtest.Must(t, more.Err())
	vmtest.Must(t, w.Err())
	_, err = v.Verify(vmtest.Within(t, vmtest.JobLimit), nil)
	vmtest.Must(t, err)
	vmtest.Must(t, v.Unmount(vmtest.Limited(t)))
	if vmtest.IsMounted(t, s.Guest, path) {
		t.Error("its holder has released it, but it is still mounted")
	}
	vmtest.Detach(t, v)
}
