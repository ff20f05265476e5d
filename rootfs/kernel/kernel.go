package kernel

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// Kernel describes the files of one kernel in a directory. It only reads them.
type Kernel struct {
	// Version is the kernel's release, as uname -r prints it in the guest.
	Version string
	// Image is the host path of the bootable image, vmlinuz.
	Image string

	root    string              // the host directory that contains lib/modules/VERSION's content
	files   map[string]string   // module name → path below root
	builtIn map[string]bool     // names of built-in modules, and their aliases
	aliases map[string][]string // alias → names of loadable modules, sorted; nil until needed
}

// Module is one loadable module of a Kernel.
type Module struct {
	// Name is the module's name in the kernel's spelling, with underscores.
	Name string
	// Path is the module's path below lib/modules/VERSION after decompression, with slashes:
	// kernel/fs/xfs/xfs.ko.
	Path string

	file string // host path
}

// Read returns the decompressed module, ready for finit_module(2).
func (m Module) Read() ([]byte, error) { return readModule(m.file) }

// version matches a valid kernel release. The release becomes part of paths on the host and in the
// guest, and the kernel's limit is 64 bytes (include/uapi/linux/utsname.h).
var version = regexp.MustCompile(`^[0-9][0-9A-Za-z.+~_-]{0,63}$`)

func openDir(dir string) (*Kernel, error) {
	images, err := findImages(dir)
	if err != nil {
		return nil, err
	}
	if len(images) != 1 {
		return nil, fmt.Errorf("kernel folder %s holds %d kernels (boot/vmlinuz-* or lib/modules/*/vmlinuz): name a folder with the files of one kernel, from all its packages if it is split", dir, len(images))
	}
	k := &Kernel{files: map[string]string{}, builtIn: map[string]bool{}}
	for k.Version, k.Image = range images { // there is exactly one
	}
	if !version.MatchString(k.Version) {
		return nil, fmt.Errorf("kernel folder %s: %q is not a kernel version", dir, k.Version)
	}
	if k.root, err = moduleRoot(dir, k.Version); err != nil {
		return nil, err
	}
	if err := k.index(); err != nil {
		return nil, fmt.Errorf("kernel folder %s: %w", dir, err)
	}
	return k, nil
}

// findImages returns the boot images by their kernels' versions. Debian's packages have them in
// /boot, and since forky beside the modules; installation then copies them to /boot.
func findImages(dir string) (map[string]string, error) {
	images := map[string]string{}
	for _, place := range []string{"boot/vmlinuz-*", "lib/modules/*/vmlinuz", "usr/lib/modules/*/vmlinuz"} {
		files, err := filepath.Glob(filepath.Join(escapeGlob(dir), place))
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			release, ok := strings.CutPrefix(filepath.Base(file), "vmlinuz-")
			if !ok {
				release = filepath.Base(filepath.Dir(file))
			}
			if _, there := images[release]; !there {
				images[release] = file
			}
		}
	}
	return images, nil
}

// escapeGlob escapes the characters in a directory's name that have a meaning in a pattern.
func escapeGlob(dir string) string {
	return regexp.MustCompile(`[\\*?\[]`).ReplaceAllString(dir, `\$0`)
}

// moduleRoot returns the directory of the modules in Debian's packages: below /lib until bookworm,
// below /usr/lib since trixie.
func moduleRoot(dir, version string) (string, error) {
	for _, lib := range []string{"lib", "usr/lib"} {
		root := filepath.Join(dir, lib, "modules", version)
		if info, err := os.Stat(filepath.Join(root, "kernel")); err == nil && info.IsDir() {
			return root, nil
		}
	}
	return "", fmt.Errorf("kernel folder %s has no lib/modules/%s/kernel: name a folder that also holds the kernel's modules", dir, version)
}

// index records each module's path, and which modules are built into the kernel image.
func (k *Kernel) index() error {
	err := filepath.WalkDir(filepath.Join(k.root, "kernel"), func(file string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		name, ok := moduleName(file)
		if !ok {
			return nil
		}
		rel, err := filepath.Rel(k.root, file)
		if err != nil {
			return err
		}
		if other, twice := k.files[name]; twice {
			return fmt.Errorf("module %s exists twice, as %s and %s", name, other, rel)
		}
		k.files[name] = rel
		return nil
	})
	if err != nil {
		return err
	}
	return k.indexBuiltIn()
}

// BuiltInList returns modules.builtin, which lists the modules that the guest need not load.
func (k *Kernel) BuiltInList() ([]byte, error) {
	return os.ReadFile(filepath.Join(k.root, "modules.builtin"))
}

// indexBuiltIn reads modules.builtin. A line is the path that the module would have if it were
// loadable (Documentation/kbuild/kbuild.rst).
func (k *Kernel) indexBuiltIn() error {
	f, err := os.Open(filepath.Join(k.root, "modules.builtin"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if name, ok := moduleName(lines.Text()); ok {
			k.builtIn[name] = true
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read %s: %w", f.Name(), err)
	}
	return k.indexBuiltInAliases()
}

// indexBuiltInAliases reads modules.builtin.modinfo: the .modinfo entries of the built-in modules.
// Each key follows the module's name and a dot (Documentation/kbuild/kbuild.rst).
func (k *Kernel) indexBuiltInAliases() error {
	file := filepath.Join(k.root, "modules.builtin.modinfo")
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for entry := range strings.SplitSeq(string(data), "\x00") {
		key, value, _ := strings.Cut(entry, "=")
		if _, field, _ := strings.Cut(key, "."); field == "alias" {
			k.builtIn[normalise(value)] = true
		}
	}
	return nil
}

// moduleName returns the name of the module in a file, and false if the file is not a module.
func moduleName(file string) (string, bool) {
	name, ok := strings.CutSuffix(uncompressed(path.Base(filepath.ToSlash(file))), ".ko")
	return normalise(name), ok && name != ""
}

// normalise returns the kernel's spelling of a module's name. Dashes and underscores are equivalent
// (scripts/Makefile.lib turns dashes into underscores).
func normalise(name string) string { return strings.ReplaceAll(name, "-", "_") }
