//go:build long

package service

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// systemdAgent is the path of the agent in the unit of the Debian package.
const systemdAgent = "/usr/bin/directvol-agent"

// testGuestUnit is the unit of the program that acts for tests.
const testGuestUnit = `[Service]
ExecStart=/usr/local/bin/test-guest serve
[Install]
WantedBy=multi-user.target
`

// override is a drop-in that takes effect after the shipped drop-in.
var override = fmt.Sprintf("[Service]\nEnvironment=\"DIRECTVOL_AGENT_FLAGS=-log debug -resize-wait %v\"\n", vm.Limit(vmtest.CallLimit))

// packages are the packages of the Debian in addition to its minbase.
const packages = "systemd-sysv,udev,dbus"

// TestSystemdRestartsTheAgentAndNoVolumeIsLost boots a Debian made by mmdebstrap, with the Debian
// packages of make dist and the drop-in that is their example.
func TestSystemdRestartsTheAgentAndNoVolumeIsLost(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("a Debian's files have owners that only root can give: run make test-long as root")
	}
	disk := debianDisk(t)
	g := vmtest.Boot(t, vm.Options{
		Append:    remote.OnDisk + " systemd.show_status=0 agent.log=info",
		BootDisks: []qemu.Disk{{ID: "root", Path: disk}},
	})
	s := daemon{g, systemdAgent}
	awaitTestGuest(t, g)
	t.Run("it is up, with its drop-ins", func(t *testing.T) { runsAsItsUnitSays(t, s) })
	t.Run("stopped and started", func(t *testing.T) { stoppedAndStarted(t, s) })
	t.Run("its package upgraded", func(t *testing.T) { upgraded(t, s) })
	t.Run("its package removed and installed again", func(t *testing.T) { removedAndInstalled(t, s) })
	losesNoVolume(t, s)
}

// awaitTestGuest waits for the program that acts for tests, which systemd starts in parallel with
// the agent.
func awaitTestGuest(t *testing.T, g *vm.Guest) {
	ctx := vmtest.Within(t, vmtest.JobLimit)
	again := time.NewTicker(100 * time.Millisecond) // nothing tells the host
	defer again.Stop()
	for {
		_, err := g.Remote.Stat(ctx, "/")
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
		<-again.C
	}
}

// runsAsItsUnitSays checks that systemd regards the agent as ready.
func runsAsItsUnitSays(t *testing.T, s daemon) {
	said := systemctl(t, s, "show", "directvol-agent.service", "--property=ActiveState,SubState,Type,DropInPaths,Environment")
	for _, want := range []string{"ActiveState=active", "SubState=running", "Type=notify", "directvol-agent.service.d/settings.conf", "directvol-agent.service.d/test.conf", "-log debug"} {
		if !strings.Contains(said, want) {
			t.Errorf("systemctl show\nwant %s\ngot  %s", want, said)
		}
	}
	vmtest.Must(t, s.Agent().Check(vmtest.Limited(t)))
	if line, err := s.Remote.ReadFile(vmtest.Limited(t), "/proc/"+mainPID(t, s)+"/cmdline"); err != nil || !strings.Contains(string(line), "-log\x00debug\x00") {
		t.Errorf("the agent's command line\nwant -log debug\ngot  %q, error %v", line, err)
	}
}

func mainPID(t *testing.T, s daemon) string {
	t.Helper()
	return strings.TrimSpace(systemctl(t, s, "show", "directvol-agent.service", "--property=MainPID", "--value"))
}

func systemctl(t *testing.T, s daemon, args ...string) string {
	t.Helper()
	exit, err := s.Remote.Exec(vmtest.Within(t, vmtest.JobLimit), remote.Command{Argv: append([]string{"/usr/bin/systemctl"}, args...)})
	vmtest.Must(t, err)
	if exit.Code != 0 {
		t.Fatalf("systemctl %s: exit %d\n%s%s", strings.Join(args, " "), exit.Code, exit.Stdout, exit.Stderr)
	}
	return string(exit.Stdout)
}

// stoppedAndStarted stops and starts the service. The volumes stay mounted.
func stoppedAndStarted(t *testing.T, s daemon) {
	v, w := written(t, s, "stopped")
	systemctl(t, s, "stop", "directvol-agent.service")
	if got := systemctl(t, s, "show", "directvol-agent.service", "--property=ActiveState,Result,ExecMainStatus"); !strings.Contains(got, "ActiveState=inactive") || !strings.Contains(got, "Result=success") || !strings.Contains(got, "ExecMainStatus=0") {
		t.Errorf("systemctl show of the stopped unit\nwant inactive, and that it exited with 0\ngot  %s", got)
	}
	if !vmtest.IsMounted(t, s.Guest, v.GuestPath) {
		t.Fatal("it was unmounted with the service")
	}
	systemctl(t, s, "start", "directvol-agent.service")
	letGo(t, s, v, w)
}

// debianDisk makes an ext4 image with a Debian with systemd and the packages of make dist.
func debianDisk(t *testing.T) string {
	t.Helper()
	build := found(t)
	root := filepath.Join(t.TempDir(), "root")
	vmtest.Must(t, os.Mkdir(root, 0o755))
	command(t, "tar", "-C", root, "--numeric-owner", "-xpf", debianArchive(t))
	installPackages(t, root)
	units := filepath.Join(root, "etc/systemd/system")
	dropIns := filepath.Join(units, "directvol-agent.service.d")
	vmtest.Must(t, os.Mkdir(dropIns, 0o755))
	for guest, host := range map[string]string{
		filepath.Join(root, "usr/local/bin/test-guest"): filepath.Join(build.Dir, "test-guest"),
		filepath.Join(dropIns, "settings.conf"):         filepath.Join(root, "usr/share/doc/directvol-agent/settings.conf"),
	} {
		vmtest.Must(t, copyFile(guest, host))
	}
	vmtest.Must(t, os.WriteFile(filepath.Join(dropIns, "test.conf"), []byte(override), 0o644))
	vmtest.Must(t, os.WriteFile(filepath.Join(units, "test-guest.service"), []byte(testGuestUnit), 0o644))
	command(t, "chroot", root, "systemctl", "enable", "directvol-agent.service", "test-guest.service")
	disk := filepath.Join(t.TempDir(), "debian.img")
	command(t, "mkfs.ext4", "-q", "-F", "-d", root, disk, "1G")
	return disk
}

// debianArchive makes the Debian with mmdebstrap, once.
func debianArchive(t *testing.T) string {
	t.Helper()
	const suite = "bookworm"
	archive := filepath.Join(found(t).Dir, "cache", "debian-"+suite+"-"+strings.ReplaceAll(packages, ",", "-")+".tar")
	if _, err := os.Stat(archive); err == nil {
		return archive
	}
	made := filepath.Join(t.TempDir(), "debian.tar")
	t.Log("mmdebstrap makes a Debian with systemd: a minute or two")
	command(t, "mmdebstrap", "--variant=minbase", "--include="+packages, suite, made)
	vmtest.Must(t, copyFile(archive+".new", made))
	vmtest.Must(t, os.Rename(archive+".new", archive))
	return archive
}

func found(t *testing.T) vm.Build {
	t.Helper()
	build, err := vm.FindBuild()
	vmtest.Must(t, err)
	return build
}

func command(t *testing.T, name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), vm.Limit(vmtest.JobLimit))
	defer cancel()
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, info.Mode().Perm())
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}
