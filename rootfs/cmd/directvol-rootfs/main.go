// Command directvol-rootfs makes a bootable guest image from Debian's kernel package and the programs it is given.
// All it does is in package rootfs; this is its command line.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/directvol/directvol/rootfs"
	"github.com/directvol/directvol/rootfs/kernel"
)

const help = `Make a bootable initramfs from a kernel package and the programs you name. Needs no root.

Example:
  directvol-rootfs --program /init=build/directvol-agent
  qemu-system-x86_64 -M q35 -cpu max -m 512 -nographic -no-reboot \
      -kernel build/vmlinuz -initrd build/guest.cpio -append "console=ttyS0 panic=-1"

The first run downloads Debian's linux-image-cloud-amd64 into the cache (27 MB); later runs need no network. Remove the
cache to get a newer kernel, or name another suite of Debian's archive (--suite). In the guest, /etc/directvol/modules
lists the kernel modules, one path a line in load order, for /init to give to finit_module(2). The same input makes the
same bytes.

Options:
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	if ctx.Err() != nil {
		err = errors.New("interrupted: run it again")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "directvol-rootfs:", err)
		os.Exit(1)
	}
}

// run does what the arguments say. The answer goes to stdout, the progress to stderr.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	img := rootfs.Image{Kernel: kernel.Source{Progress: stderr}}
	flags := flag.NewFlagSet("directvol-rootfs", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // errors are one line, and --help goes to stdout
	flags.Func("program", "a program of the guest, as `GUESTPATH=FILE`; one must be /init (repeatable)", func(value string) error {
		guest, host, ok := strings.Cut(value, "=")
		if !ok || guest == "" || host == "" {
			return errors.New("want GUESTPATH=FILE")
		}
		img.Programs = append(img.Programs, rootfs.Program{Guest: guest, Host: host})
		return nil
	})
	flags.Func("module", "the `NAME` of a kernel module beside "+strings.Join(rootfs.DefaultModules(), ", ")+" (repeatable)", func(name string) error {
		img.Modules = append(img.Modules, name)
		return nil
	})
	flags.StringVar(&img.Kernel.Suite, "suite", "", "download the kernel from this `SUITE` of Debian's archive, such as trixie-backports, at the mirror that apt uses")
	flags.Func("kernel-deb", "take the kernel from this package `FILE` (repeatable: a kernel may be split into several)", func(file string) error {
		if file == "" {
			return errors.New("want FILE")
		}
		img.Kernel.Debs = append(img.Kernel.Debs, file)
		return nil
	})
	flags.StringVar(&img.Kernel.Dir, "kernel-dir", "", "take the kernel from this `FOLDER`, which holds vmlinuz and lib/modules as a package does")
	flags.StringVar(&img.Kernel.Cache, "cache", kernel.DefaultCache, "`FOLDER` for packages downloaded and unpacked")
	flags.StringVar(&img.Out, "out", "build/guest.cpio", "`FILE` for the image")
	flags.StringVar(&img.KernelOut, "kernel-out", "build/vmlinuz", "`FILE` for the kernel")
	asJSON := flags.Bool("json", false, "print the result as JSON")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(stdout, help)
		flags.SetOutput(stdout)
		flags.PrintDefaults()
		return nil
	} else if err != nil {
		return fmt.Errorf("%w (see --help)", err)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q (see --help)", flags.Arg(0))
	}
	result, err := rootfs.Build(ctx, img)
	if err != nil {
		return err
	}
	if *asJSON {
		return json.NewEncoder(stdout).Encode(result)
	}
	_, err = fmt.Fprintf(stdout, "kernel %s, %d modules, %.1f MB: %s\n", result.Kernel, len(result.Modules), float64(result.ImageBytes)/1e6, result.Image)
	return err
}
