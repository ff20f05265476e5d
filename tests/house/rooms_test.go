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

// floors are the agent's packages from the top down. A package imports only packages below its own
// floor, except in tests. It may use a package beside it through an interface of its own, as
// agent/storage uses agent/volume.
var floors = [][]string{
	{"agent/cmd/directvol-agent"},
	{"agent/rpc"},
	{"agent/sandbox"},
	{"agent/storage", "agent/volume", "agent/guest"},
	{"agent/health", "agent/server"},
	{"agent/mount", "agent/filesystem", "agent/state", "agent/transport", "agent/debugconsole"},
	{"agent/blockdev", "agent/contract", "agent/guestinit", "agent/arrival"},
	{"agent/deadline", "agent/errkind", "agent/fanotify", "agent/flight", "agent/logbuffer", "agent/metrics", "agent/netlink", "agent/turns", "agent/xfsmonitor"},
}

// floorOf returns the index of a package's floor, or -1 if it has none.
func floorOf(name string) int {
	return slices.IndexFunc(floors, func(floor []string) bool { return slices.Contains(floor, name) })
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
			inside, ours := strings.CutPrefix(imported, module+"/")
			if file.room() != "agent" || file.test() || !ours || !strings.HasPrefix(inside, "agent/") {
				continue
			}
			own, other := floorOf(file.dir()), floorOf(inside)
			switch {
			case own < 0:
				broken = append(broken, fmt.Sprintf("%s: %s has no floor in tests/house", file.path, file.dir()))
			case other < 0:
				broken = append(broken, fmt.Sprintf("%s: %s has no floor in tests/house", file.path, inside))
			case own >= other:
				broken = append(broken, fmt.Sprintf("%s: %s may not import %s, which is not below it", file.path, file.dir(), inside))
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
