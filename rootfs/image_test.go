package rootfs

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/directvol/directvol/protocols/modulelist"
	"github.com/directvol/directvol/rootfs/kernel"
	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

// defaultTree makes a kernel with the default modules, some of them built in.
func defaultTree(t *testing.T) string {
	return kerneltest.Tree(t, map[string][]string{
		"kernel/drivers/virtio/virtio.ko":                    {"depends="},
		"kernel/drivers/virtio/virtio_pci.ko":                {"depends=virtio"},
		"kernel/net/vmw_vsock/vmw_vsock_virtio_transport.ko": {"depends=virtio"},
		"kernel/fs/xfs/xfs.ko":                               {"depends=libcrc32c"},
		"kernel/fs/btrfs/btrfs.ko":                           {"depends=raid6_pq,libcrc32c"},
		"kernel/lib/raid6/raid6_pq.ko":                       {"depends="},
		"kernel/lib/libcrc32c.ko":                            {"softdep=pre: crc32c"},
		"kernel/drivers/scsi/scsi_debug.ko":                  {"depends="},
		"kernel/drivers/scsi/virtio_scsi.ko":                 {"depends=virtio"},
		"kernel/fs/fuse/virtiofs.ko":                         {"depends=virtio"},
		"kernel/drivers/acpi/button.ko":                      {"depends="},
	}, "kernel/drivers/block/virtio_blk.ko", "kernel/drivers/scsi/sd_mod.ko")
}

// testImage returns an image with a small kernel and a static /init, whose outputs are in a new
// directory.
func testImage(t *testing.T) Image {
	t.Helper()
	host := filepath.Join(t.TempDir(), "init")
	kerneltest.WriteFile(t, host, kerneltest.Module())
	out := t.TempDir()
	return Image{
		Kernel:   kernel.Source{Dir: defaultTree(t)},
		Programs: []Program{{Guest: "/init", Host: host}},
		Out:      filepath.Join(out, "guest.cpio"), KernelOut: filepath.Join(out, "vmlinuz"),
	}
}

func readImage(t *testing.T, file string) []cpio.Record {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	records, err := cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(data)))
	if err != nil {
		t.Fatal(err)
	}
	return records
}

func contentOf(t *testing.T, records []cpio.Record, name string) string {
	t.Helper()
	for _, r := range records {
		if r.Name == name {
			data, err := io.ReadAll(io.NewSectionReader(r, 0, int64(r.FileSize)))
			if err != nil {
				t.Fatal(err)
			}
			return string(data)
		}
	}
	t.Fatalf("the image has no %s", name)
	return ""
}

func TestSameInputSameBytes(t *testing.T) {
	var images [][]byte
	for range 2 { // the same files, in another directory and with other times
		img := testImage(t)
		img.Modules = []string{"scsi-debug"}
		if _, err := Build(t.Context(), img); err != nil {
			t.Fatal(err)
		}
		for _, file := range []string{img.Out, img.KernelOut} {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			images = append(images, data)
		}
	}
	if !bytes.Equal(images[0], images[2]) || !bytes.Equal(images[1], images[3]) {
		t.Error("two builds of the same input differ")
	}
}

func TestEntriesAreRootsSortedAndTimeless(t *testing.T) {
	img := testImage(t)
	result, err := Build(t.Context(), img)
	if err != nil {
		t.Fatal(err)
	}
	records := readImage(t, img.Out)
	seen := map[string]bool{".": true}
	var names []string
	for i, r := range records {
		if r.UID != 0 || r.GID != 0 || r.MTime != 0 || r.Ino != uint64(i+1) || r.NLink != 1 {
			t.Errorf("entry %d is %+v:\nwant owner 0:0, time 0, inode %d, one link", i, r.Info, i+1)
		}
		if !seen[path.Dir(r.Name)] {
			t.Errorf("%s comes before its folder", r.Name)
		}
		seen[r.Name] = true
		names = append(names, r.Name)
	}
	if !slices.IsSorted(names) {
		t.Errorf("entries are not sorted: %q", names)
	}
	for _, want := range []string{"dev/console", "etc", "init", "proc", "run", "sys", "tmp", strings.TrimPrefix(modulelist.Path, "/")} {
		if !seen[want] {
			t.Errorf("the image has no %s", want)
		}
	}
	if info, err := os.Stat(img.Out); err != nil || info.Size() != result.ImageBytes {
		t.Errorf("size of the image:\n got %d\nwant that of %v, %v", result.ImageBytes, info, err)
	}
}

func TestModuleListIsTheLoadOrder(t *testing.T) {
	img := testImage(t)
	img.Modules = []string{"scsi_debug", "xfs"}
	result, err := Build(t.Context(), img)
	if err != nil {
		t.Fatal(err)
	}
	root := "/lib/modules/" + kerneltest.Version + "/kernel/"
	want := []string{
		root + "drivers/virtio/virtio.ko", root + "drivers/virtio/virtio_pci.ko", root + "net/vmw_vsock/vmw_vsock_virtio_transport.ko",
		root + "lib/libcrc32c.ko", root + "fs/xfs/xfs.ko", root + "drivers/scsi/virtio_scsi.ko",
		root + "fs/fuse/virtiofs.ko", root + "drivers/acpi/button.ko", root + "drivers/scsi/scsi_debug.ko",
	}
	if !slices.Equal(result.Modules, want) {
		t.Errorf("modules:\n got %q\nwant %q", result.Modules, want)
	}
	records := readImage(t, img.Out)
	if got := contentOf(t, records, strings.TrimPrefix(modulelist.Path, "/")); got != strings.Join(want, "\n")+"\n" {
		t.Errorf("%s:\n got %q\nwant %q, one a line", modulelist.Path, got, want)
	}
	later := []string{root + "lib/raid6/raid6_pq.ko", root + "fs/btrfs/btrfs.ko"} // not at boot
	if got := contentOf(t, records, strings.TrimPrefix(modulelist.BtrfsPath, "/")); got != strings.Join(later, "\n")+"\n" {
		t.Errorf("%s:\n got %q\nwant %q, one a line", modulelist.BtrfsPath, got, later)
	}
	for _, module := range append(want, later...) {
		contentOf(t, records, strings.TrimPrefix(module, "/"))
	}
}

func TestRefusedBuildLeavesFilesAlone(t *testing.T) {
	dynamic := filepath.Join(t.TempDir(), "dynamic")
	kerneltest.WriteFile(t, dynamic, dynamicProgram(t))
	script := filepath.Join(t.TempDir(), "script")
	kerneltest.WriteFile(t, script, []byte("#!/bin/sh\n"))
	for _, test := range []struct {
		name   string
		change func(*Image)
		want   string
	}{
		{"no /init", func(i *Image) { i.Programs[0].Guest = "/bin/agent" }, "no program is named as /init"},
		{"dynamic /init", func(i *Image) { i.Programs[0].Host = dynamic }, "needs /lib64/ld-linux-x86-64.so.2; build it with CGO_ENABLED=0"},
		{"/init is a script", func(i *Image) { i.Programs[0].Host = script }, "not an ELF executable"},
		{"no such program", func(i *Image) { i.Programs[0].Host += "-gone" }, "init-gone"},
		{"relative path", func(i *Image) { i.Programs = append(i.Programs, Program{"bin/x", dynamic}) }, `"bin/x": want an absolute path`},
		{"path with ..", func(i *Image) { i.Programs = append(i.Programs, Program{"/bin/../x", dynamic}) }, "want an absolute path"},
		{"path twice", func(i *Image) { i.Programs = append(i.Programs, i.Programs[0]) }, "/init is named twice"},
		{"path is a folder", func(i *Image) { i.Programs = append(i.Programs, Program{"/lib/modules", dynamic}) }, "lies below /lib/modules, which is a file"},
		{"path below a file", func(i *Image) { i.Programs = append(i.Programs, Program{"/init/x/y", dynamic}) }, "lies below /init"},
		{"unknown module", func(i *Image) { i.Modules = []string{"nosuch"} }, `no module "nosuch"`},
	} {
		img := testImage(t)
		kerneltest.WriteFile(t, img.Out, []byte("an older image"))
		test.change(&img)
		_, err := Build(t.Context(), img)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s:\n got error %v\nwant one with %q", test.name, err, test.want)
		}
		checkOnly(t, img.Out, "an older image")
	}
}

// If --program is missing, the error must come before a kernel is downloaded.
func TestProgramsAreCheckedBeforeAKernelIsLookedFor(t *testing.T) {
	img := testImage(t)
	img.Kernel = kernel.Source{Dir: filepath.Join(t.TempDir(), "gone")}
	img.Programs = nil
	if _, err := Build(t.Context(), img); err == nil || !strings.Contains(err.Error(), "no program is named as /init") {
		t.Errorf("no program, and no kernel\nwant what is said of /init\ngot  %v", err)
	}
}

func TestOutputsThatAreNotSeparateFilesAreRefused(t *testing.T) {
	for name, change := range map[string]func(*Image){
		"a device": func(img *Image) { img.Out = "/dev/null" },
		"a folder": func(img *Image) { img.KernelOut = t.TempDir() },
		"the same": func(img *Image) { img.KernelOut = img.Out + "/." },
		"no end":   func(img *Image) { img.Programs[0].Host = "/dev/zero" },
	} {
		img := testImage(t)
		change(&img)
		if _, err := Build(t.Context(), img); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	if info, err := os.Stat("/dev/null"); err != nil || info.Mode().IsRegular() {
		t.Errorf("/dev/null is %v, %v", info.Mode(), err)
	}
}

func TestCancelledBuildLeavesFilesAlone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	img := testImage(t)
	kerneltest.WriteFile(t, img.Out, []byte("an older image"))
	if _, err := Build(ctx, img); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled build:\n got error %v\nwant %v", err, context.Canceled)
	}
	checkOnly(t, img.Out, "an older image")
}

func TestWriteThatFailsHalfwayLeavesFileAlone(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	kerneltest.WriteFile(t, file, []byte("old"))
	cause := errors.New("disk on fire")
	_, err := replaceFile(t.Context(), file, func(w io.Writer) (int64, error) {
		if _, err := w.Write(make([]byte, 4<<20)); err != nil {
			return 0, err
		}
		return 4 << 20, cause
	})
	if !errors.Is(err, cause) {
		t.Errorf("failing write:\n got error %v\nwant %v", err, cause)
	}
	checkOnly(t, file, "old")
}

// checkOnly checks that the file has this content and is alone in its directory.
func checkOnly(t *testing.T, file, want string) {
	t.Helper()
	got, err := os.ReadFile(file)
	if err != nil || string(got) != want {
		t.Errorf("%s:\n got %q, %v\nwant %q", filepath.Base(file), got, err, want)
	}
	entries, err := os.ReadDir(filepath.Dir(file))
	if err != nil || len(entries) != 1 {
		t.Errorf("files in its folder:\n got %v, %v\nwant it alone", entries, err)
	}
}

// dynamicProgram makes an ELF executable that asks for glibc's dynamic linker and contains nothing
// else.
func dynamicProgram(t *testing.T) []byte {
	t.Helper()
	const headerSize, segmentSize = 64, 56
	linker := []byte("/lib64/ld-linux-x86-64.so.2\x00")
	header := elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Phoff: headerSize, Ehsize: headerSize, Phentsize: segmentSize, Phnum: 1,
	}
	segment := elf.Prog64{Type: uint32(elf.PT_INTERP), Off: headerSize + segmentSize, Filesz: uint64(len(linker))}
	var program bytes.Buffer
	for _, part := range []any{header, segment, linker} {
		if err := binary.Write(&program, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return program.Bytes()
}
