package house

import (
	"fmt"
	"go/ast"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// rooms is the table of CONTRIBUTING.md: the rooms that each room may import besides itself.
var rooms = map[string][]string{
	"protocols": nil,
	"agent":     {"protocols"},
	"host":      {"protocols"},
	"rootfs":    {"protocols"},
	"tools":     {"protocols", "agent", "host", "rootfs", "tests"},
	"tests":     {"protocols", "agent", "host", "rootfs"},
}

// above maps a package of the agent to the packages that it must not import, except in tests: it is
// below them, or uses them through its own interface.
var above = map[string][]string{
	"agent/storage": {"agent/rpc", "agent/sandbox", "agent/volume"},
	"agent/volume":  {"agent/rpc", "agent/sandbox", "agent/storage"},
	"agent/health":  {"agent/rpc", "agent/sandbox", "agent/storage", "agent/volume"},
	"agent/mount":   {"agent/rpc", "agent/sandbox", "agent/storage", "agent/volume", "agent/health", "agent/state"},
	"agent/state":   {"agent/rpc", "agent/sandbox", "agent/storage", "agent/volume", "agent/health", "agent/mount"},
}

// besides are the names that may be at the top besides the rooms and dotfiles. build contains build
// products.
var besides = []string{"build", "deploy", "docs", "Makefile", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "go.mod", "go.sum"}

func onlyRooms(t *tree) (broken []string) {
	entries, err := fs.ReadDir(t, ".")
	if err != nil {
		return []string{err.Error()}
	}
	for _, entry := range entries {
		name := entry.Name()
		if _, room := rooms[name]; !room && !strings.HasPrefix(name, ".") && !slices.Contains(besides, name) {
			broken = append(broken, name+": no room, and nothing that may stand beside them")
		}
	}
	return broken
}

func roomImports(t *tree) (broken []string) {
	for _, file := range t.sources {
		for imported := range file.imports() {
			inside, ours := strings.CutPrefix(imported, module+"/")
			room, _, _ := strings.Cut(inside, "/")
			if ours && room != file.room() && !slices.Contains(rooms[file.room()], room) {
				broken = append(broken, fmt.Sprintf("%s: %s may not import %s", file.path, file.room(), imported))
			}
		}
	}
	return broken
}

func importsAbove(t *tree) (broken []string) {
	for _, file := range t.sources {
		for imported := range file.imports() {
			if inside, _ := strings.CutPrefix(imported, module+"/"); !file.test() && slices.Contains(above[file.dir()], inside) {
				broken = append(broken, fmt.Sprintf("%s: %s may not import %s, which is above it", file.path, file.dir(), inside))
			}
		}
	}
	return broken
}

// programsAlike requires the programs for people to use one place for exit statuses, --version,
// signals and one-line errors.
func programsAlike(t *tree) (broken []string) {
	for _, file := range t.sources {
		if file.Name.Name != "main" || file.test() || !slices.Contains([]string{"host", "rootfs", "tools"}, file.room()) {
			continue
		}
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); !ok || f.Recv != nil || f.Name.Name != "main" {
				continue
			}
			if _, ok := file.imports()[module+"/protocols/program"]; !ok {
				broken = append(broken, t.at(decl, "main starts without package program: want program.Main"))
			}
		}
	}
	return broken
}

// vague are package names that say nothing about the content.
var vague = []string{"util", "utils", "common", "helper", "helpers", "misc", "manager", "lib", "base"}

func forbiddenNames(t *tree) (broken []string) {
	for _, file := range t.sources {
		if name := strings.TrimSuffix(file.Name.Name, "_test"); slices.Contains(vague, name) {
			broken = append(broken, fmt.Sprintf("%s: package %s", file.path, name))
		}
	}
	_ = fs.WalkDir(t, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil || !entry.IsDir():
			return err
		case ignored(name):
			return fs.SkipDir
		case slices.Contains(vague, path.Base(name)):
			broken = append(broken, name+": folder")
		}
		return nil
	})
	return broken
}
