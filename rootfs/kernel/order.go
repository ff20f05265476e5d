package kernel

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// Order returns the modules to load for names, each after everything that it needs, and none twice.
// It omits modules that are built into the kernel image. The guest needs neither modprobe nor
// depmod: it just loads the modules in this order.
//
// A softdep is included if the kernel has it, by name or by alias. A built-in module satisfies a
// softdep: xfs asks for crc32c and gets the built-in portable one of Debian's kernel. modprobe
// would also load crc32c-intel. But that module loads only on CPUs with the instruction, and in
// this list every line must succeed. A caller can request crc32c-intel by its name.
//
// An unknown name is an error, and so is a cycle; the error names the modules.
func (k *Kernel) Order(names ...string) ([]Module, error) {
	r := resolver{kernel: k, done: map[string]bool{}}
	for _, name := range names {
		if err := r.visit(normalise(name)); err != nil {
			return nil, err
		}
	}
	return r.order, nil
}

// resolver walks modules depth first.
type resolver struct {
	kernel *Kernel
	order  []Module
	done   map[string]bool
	chain  []string // the modules being visited, outermost first
}

func (r *resolver) visit(name string) error {
	if r.kernel.builtIn[name] || r.done[name] {
		return nil
	}
	path, ok := r.kernel.files[name]
	if !ok {
		return fmt.Errorf("kernel %s has no module %q%s", r.kernel.Version, name, r.neededBy())
	}
	if slices.Contains(r.chain, name) {
		return fmt.Errorf("kernel %s: modules depend on each other in a circle: %s", r.kernel.Version, strings.Join(append(r.chain, name), " → "))
	}
	file := filepath.Join(r.kernel.root, path)
	info, err := readModinfo(file)
	if err != nil {
		return fmt.Errorf("module %s: %w", file, err)
	}
	r.chain = append(r.chain, name)
	if err := r.visitNeeds(name, info); err != nil {
		return err
	}
	r.chain = r.chain[:len(r.chain)-1]
	r.done[name] = true
	r.order = append(r.order, Module{Name: name, Path: uncompressed(filepath.ToSlash(path)), file: file})
	return nil
}

func (r *resolver) visitNeeds(name string, info modinfo) error {
	for _, soft := range info.pre {
		providers, err := r.kernel.providers(soft)
		if err != nil {
			return err
		}
		for _, provider := range providers {
			if provider == name { // the module itself may have the alias that it asks for
				continue
			}
			if err := r.visit(provider); err != nil {
				return err
			}
		}
	}
	for _, need := range info.depends {
		if err := r.visit(normalise(need)); err != nil {
			return err
		}
	}
	return nil
}

func (r *resolver) neededBy() string {
	if len(r.chain) == 0 {
		return ""
	}
	return ", needed by " + r.chain[len(r.chain)-1]
}

// providers returns the modules that satisfy a softdep: the module with that name, built in or not,
// or otherwise all modules with that alias, unless a built-in module has the alias.
func (k *Kernel) providers(soft string) ([]string, error) {
	name := normalise(soft)
	if _, ok := k.files[name]; ok || k.builtIn[name] {
		return []string{name}, nil
	}
	if k.aliases == nil {
		if err := k.indexAliases(); err != nil {
			return nil, err
		}
	}
	return k.aliases[name], nil
}

// indexAliases indexes the aliases of all modules. It reads every module, so it runs only when a
// softdep cannot be resolved otherwise.
func (k *Kernel) indexAliases() error {
	aliases := map[string][]string{}
	for _, name := range slices.Sorted(maps.Keys(k.files)) {
		file := filepath.Join(k.root, k.files[name])
		info, err := readModinfo(file)
		if err != nil {
			return fmt.Errorf("module %s: %w", file, err)
		}
		for _, alias := range info.aliases {
			alias = normalise(alias)
			if !slices.Contains(aliases[alias], name) {
				aliases[alias] = append(aliases[alias], name)
			}
		}
	}
	k.aliases = aliases
	return nil
}
