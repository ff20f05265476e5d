package volumes

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/rpc"
	"github.com/directvol/directvol/protocols/modulelist"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

func TestAgentReportsItsVersionAndFeatures(t *testing.T) {
	g := guest(t)
	ctx := limited(t)
	must(t, g.Agent().Check(ctx))
	version, err := g.Agent().Version(ctx)
	must(t, err)
	if version.GrpcVersion != "0.0.1" || version.AgentVersion == "" {
		t.Errorf("version\nwant 0.0.1 and the agent's\ngot  %v", version)
	}
	details, err := g.Agent().GetGuestDetails(ctx)
	must(t, err)
	agent := details.AgentDetails
	if !agent.InitDaemon || agent.Version != version.AgentVersion || !slices.Contains(agent.ExtraFeatures, rpc.StorageOnly) || !slices.Contains(agent.StorageHandlers, "blk") {
		t.Errorf("want PID 1 of version %s, with storages only, and blk among them\ngot  %v", version.AgentVersion, agent)
	}
	if details.MemBlockSizeBytes == 0 {
		t.Error("the size of a block of memory is 0, and the kernel has memory hotplug")
	}
}

func TestPID1HasMountedTheKernelsFileSystems(t *testing.T) {
	g := guest(t)
	all := vmtest.Mounts(t, g)
	for target, fstype := range map[string]string{
		"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs", "/run": "tmpfs", "/tmp": "tmpfs", "/sys/fs/cgroup": "cgroup2",
	} {
		found := 0
		for line := range strings.Lines(all) {
			if strings.Contains(line, " "+target+" ") && strings.Contains(line, " - "+fstype+" ") {
				found++
			}
		}
		if found != 1 {
			t.Errorf("mounts of %s at %s\nwant 1\ngot  %d", fstype, target, found)
		}
	}
}

func TestPID1HasLoadedEveryModuleOfTheImage(t *testing.T) {
	g := guest(t)
	ctx := limited(t)
	list, err := g.Remote.ReadFile(ctx, modulelist.Path)
	must(t, err)
	loaded, err := g.Remote.ReadFile(ctx, "/proc/modules")
	must(t, err)
	for file := range strings.FieldsSeq(string(list)) {
		name := strings.ReplaceAll(strings.TrimSuffix(path.Base(file), ".ko"), "-", "_")
		if !strings.Contains("\n"+string(loaded), "\n"+name+" ") {
			t.Errorf("module %s is not loaded", name)
		}
	}
	later, err := g.Remote.ReadFile(ctx, modulelist.BtrfsPath)
	must(t, err)
	if strings.Contains(string(list), "btrfs") || !strings.HasSuffix(string(later), "/btrfs.ko\n") {
		t.Errorf("want btrfs not loaded at boot, but later\ngot  %s, %s", list, later)
	}
	for _, name := range []string{"xfs", "vsock", "virtio_blk"} {
		if !strings.Contains("\n"+string(loaded), "\n"+name+" ") {
			t.Errorf("module %s is not loaded, of\n%s", name, loaded)
		}
	}
}

// PID 1 must reap a process whose parent has ended.
func TestPID1ReapsOrphans(t *testing.T) {
	const orphans = 5
	g := guest(t)
	v := newVolume(t, g, "ext4")
	putProgram(t, v, "orphan", orphanProgram())
	must(t, v.Mount(limited(t)))
	for range orphans {
		exit, err := g.Remote.Exec(limited(t), remote.Command{Argv: []string{v.GuestPath + "/orphan"}})
		must(t, err)
		if exit.Code != 1 {
			t.Fatalf("the program that leaves an orphan has made none: %+v", exit)
		}
	}
	ctx := limited(t)
	again := time.NewTicker(50 * time.Millisecond) // no event announces that a process was reaped
	defer again.Stop()
	for {
		zombies := orphansOf(t, g)
		if len(zombies) == 0 {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("nobody has waited for\n%s", strings.Join(zombies, "\n"))
		}
	}
}

// orphansOf returns the zombies that are PID 1's children.
func orphansOf(t *testing.T, g *vm.Guest) (zombies []string) {
	t.Helper()
	ctx := limited(t)
	load, err := g.Remote.ReadFile(ctx, "/proc/loadavg")
	must(t, err)
	fields := strings.Fields(string(load))
	last, err := strconv.Atoi(fields[len(fields)-1])
	must(t, err)
	for pid := max(2, last-40); pid <= last; pid++ {
		stat, err := g.Remote.ReadFile(ctx, fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // no process has that id
		}
		// the format is "pid (name) state ppid …", see proc(5)
		_, rest, _ := strings.Cut(string(stat), ") ")
		if strings.HasPrefix(rest, "Z 1 ") {
			zombies = append(zombies, strings.TrimSpace(string(stat)))
		}
	}
	return zombies
}

// orphanProgram returns an x86-64 program that forks and ends. Its child also ends, and nobody
// waits for the child. The program exits with 1 if it has made a child.
func orphanProgram() []byte {
	code := []byte{
		0xb8, 57, 0, 0, 0, // mov eax, SYS_fork
		0x0f, 0x05, // syscall
		0x31, 0xff, // xor edi, edi
		0x85, 0xc0, // test eax, eax
		0x40, 0x0f, 0x9f, 0xc7, // setg dil: 1 in the parent
		0xb8, 60, 0, 0, 0, // mov eax, SYS_exit
		0x0f, 0x05, // syscall
	}
	const base, headers = 0x400000, 64 + 56
	var file bytes.Buffer
	head := elf.Header64{
		Type: uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Entry: base + headers, Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1,
	}
	copy(head.Ident[:], elf.ELFMAG+string([]byte{byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)}))
	size := uint64(headers + len(code))
	_ = binary.Write(&file, binary.LittleEndian, head)
	_ = binary.Write(&file, binary.LittleEndian, elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Vaddr: base, Filesz: size, Memsz: size, Align: 4096})
	file.Write(code)
	return file.Bytes()
}

// putProgram writes a program into an ext4 that is not attached.
func putProgram(t *testing.T, v *vm.Volume, name string, program []byte) {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	must(t, os.WriteFile(file, program, 0o755))
	for _, request := range []string{"write " + file + " " + name, "set_inode_field " + name + " mode 0100755"} {
		if out, err := exec.CommandContext(limited(t), "debugfs", "-w", "-R", request, v.Path).CombinedOutput(); err != nil {
			t.Fatalf("debugfs: %v\n%s", err, out)
		}
	}
}
