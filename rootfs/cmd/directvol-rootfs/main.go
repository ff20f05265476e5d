// Command directvol-rootfs makes a bootable guest image from Debian's kernel package and the given
// programs. It is the command line of package rootfs.
package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/directvol/directvol/protocols/modulelist"
	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/rootfs"
)

func main() { program.Main(newCommand()) }

func newCommand() *cobra.Command {
	var img rootfs.Image
	var programs []string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "directvol-rootfs --program /init=FILE",
		Short: "Make a bootable guest image",
		Long: `directvol-rootfs makes a bootable initramfs from a kernel package and the programs you name. It needs no root.

The first run downloads Debian's linux-image-cloud-amd64 into the cache (27 MB; with apt-get, which installs nothing);
later runs need no network. Remove the cache to get a newer kernel, or name another suite of Debian's archive (--suite).
In the guest, /etc/directvol/modules lists the kernel modules, one path a line in load order, for /init to give to
finit_module(2). The same input makes the same bytes.`,
		Example: `  directvol-rootfs --program /init=build/directvol-agent
  qemu-system-x86_64 -M q35 -cpu max -m 512 -nographic -no-reboot \
      -kernel vmlinuz -initrd guest.cpio -append "console=ttyS0 panic=-1"`,
		Args: program.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if img.Programs, err = parsePrograms(programs); err == nil {
				err = img.Kernel.Check()
			}
			if err != nil {
				return program.Usage(err)
			}
			img.Kernel.Progress = output.NewProgress(cmd.ErrOrStderr())
			result, err := rootfs.Build(cmd.Context(), img)
			if err != nil {
				return err
			}
			text := fmt.Sprintf("kernel %s, %d modules, %v: %s\n", result.Kernel, len(result.Modules), output.Size(result.ImageBytes), result.Image)
			return output.Answer(cmd.OutOrStdout(), asJSON, result, text)
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&programs, "program", nil, "a program of the guest, as `GUESTPATH=FILE`; one must be /init (repeatable)")
	f.StringArrayVar(&img.Modules, "module", nil, "the `NAME` of a kernel module besides "+strings.Join(modulelist.Names(), ", ")+" (repeatable)")
	f.StringVar(&img.Kernel.Suite, "suite", "", "download the kernel from this `SUITE` of Debian's archive, such as trixie-backports, at the mirror that apt uses")
	f.StringArrayVar(&img.Kernel.Debs, "kernel-deb", nil, "take the kernel from this package `FILE` (repeatable: a kernel may be split into several)")
	f.StringVar(&img.Kernel.Dir, "kernel-dir", "", "take the kernel from this `FOLDER`, which holds vmlinuz and lib/modules as a package does")
	f.StringVar(&img.Kernel.Cache, "cache", "", "`FOLDER` for packages downloaded and unpacked (default: directvol in the user's cache folder, ~/.cache)")
	f.StringVar(&img.Out, "out", "guest.cpio", "`FILE` for the image")
	f.StringVar(&img.KernelOut, "kernel-out", "vmlinuz", "`FILE` for the kernel")
	f.BoolVar(&asJSON, "json", false, "print the result as JSON")
	f.SortFlags = false
	return cmd
}

// parsePrograms parses GUESTPATH=FILE arguments.
func parsePrograms(texts []string) (programs []rootfs.Program, err error) {
	for _, text := range texts {
		guest, host, ok := strings.Cut(text, "=")
		if !ok || guest == "" || host == "" {
			return nil, fmt.Errorf("--program %q: want GUESTPATH=FILE", text)
		}
		programs = append(programs, rootfs.Program{Guest: guest, Host: host})
	}
	if len(programs) == 0 {
		return nil, errors.New("no --program: name at least the agent (--program /init=FILE)")
	}
	return programs, nil
}
