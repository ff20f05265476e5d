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

// Kernel is one kernel's files in a folder, which it only reads.
type Kernel struct {
	// Version is the kernel's release, as uname -r prints it in the guest.
	Version string
	// Image is the host path of the bootable image, vmlinuz.
	Image string

	root    string              // the host's folder that stands for lib/modules/VERSION
	files   map[string]string   // module name → path below root
	builtIn map[string]bool     // module names, and the aliases that such modules carry
	aliases map[string][]string // alias → names of loadable modules, sorted; nil until asked for
}

// Module is one loadable module of a Kernel.
type Module struct {
	// Name is the module's name as the kernel has it, with underscores.
	Name string
	// Path is where it lies below lib/modules/VERSION once decompressed, slash separated: kernel/fs/xfs/xfs.ko.
	Path string

	file string // host path
}

// Read returns the module, decompressed, ready for finit_module(2).
func (m Module) Read() ([]byte, error) { return readModule(m.file) }

// version is what a release may look like: it becomes part of paths here and in the guest, and the kernel holds 64
// bytes (include/uapi/linux/utsname.h).
var version = regexp.MustCompile(`^[0-9][0-9A-Za-z.+~_-]{0,63}$`)

func openDir(dir string) (*Kernel, error) {
	images, err := findImages(dir)
	if err != nil {
		return nil, err
	}
	if len(images) != 1 {
		return nil, fmt.Errorf("kernel folder %s holds %d kernels (boot/vmlinuz-* or lib/modules/*/vmlinuz): name one that has the files of one kernel, from all packages where it is split", dir, len(images))
	}
	k := &Kernel{files: map[string]string{}, builtIn: map[string]bool{}}
	for k.Version, k.Image = range images { // the only one
	}
	if !version.MatchString(k.Version) {
		return nil, fmt.Errorf("kernel folder %s: %q is no kernel version", dir, k.Version)
	}
	if k.root, err = moduleRoot(dir, k.Version); err != nil {
		return nil, err
	}
	if err := k.index(); err != nil {
		return nil, fmt.Errorf("kernel folder %s: %w", dir, err)
	}
	return k, nil
}

// findImages finds boot images by their kernels' versions. Debian has them in /boot, and since forky beside the modules,
// from where installing copies them to /boot.
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

// escapeGlob lets a folder's name hold characters that mean something in a pattern.
func escapeGlob(dir string) string {
	return regexp.MustCompile(`[\\*?\[]`).ReplaceAllString(dir, `\$0`)
}

// moduleRoot finds the modules where Debian has them: in /lib until bookworm, in /usr/lib since trixie.
func moduleRoot(dir, version string) (string, error) {
	for _, lib := range []string{"lib", "usr/lib"} {
		root := filepath.Join(dir, lib, "modules", version)
		if info, err := os.Stat(filepath.Join(root, "kernel")); err == nil && info.IsDir() {
			return root, nil
		}
	}
	return "", fmt.Errorf("kernel folder %s has no lib/modules/%s/kernel: name one that holds the kernel's modules too", dir, version)
}

// index notes where each module lies and which ones are part of the kernel image.
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
			return fmt.Errorf("module %s is there twice, as %s and %s", name, other, rel)
		}
		k.files[name] = rel
		return nil
	})
	if err != nil {
		return err
	}
	return k.indexBuiltIn()
}

// BuiltInList returns modules.builtin, which says to the guest what it need not load.
func (k *Kernel) BuiltInList() ([]byte, error) {
	return os.ReadFile(filepath.Join(k.root, "modules.builtin"))
}

// indexBuiltIn reads modules.builtin: a line names a module as it would lie in the folder (Documentation/kbuild/kbuild.rst).
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

// indexBuiltInAliases reads modules.builtin.modinfo: the built-in modules' .modinfo entries, each key after the module's
// name and a dot (Documentation/kbuild/kbuild.rst).
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

// moduleName gives the name of the module in a file, false if the file is none.
func moduleName(file string) (string, bool) {
	name, ok := strings.CutSuffix(uncompressed(path.Base(filepath.ToSlash(file))), ".ko")
	return normalise(name), ok && name != ""
}

// normalise gives the one spelling of a module's name that the kernel knows: dashes and underscores mean the same
// (scripts/Makefile.lib turns the first into the second).
func normalise(name string) string { return strings.ReplaceAll(name, "-", "_") }
