package house

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"strconv"
	"strings"
	"testing"
)

// module is the path that begins every import of our own packages.
const module = "github.com/directvol/directvol"

// source is one Go file.
type source struct {
	path string // slash separated, from the top
	*ast.File
}

func (s source) dir() string     { return path.Dir(s.path) }
func (s source) test() bool      { return strings.HasSuffix(s.path, "_test.go") }
func (s source) generated() bool { return ast.IsGenerated(s.File) }

// room returns the top-level folder that contains the file.
func (s source) room() string {
	room, _, _ := strings.Cut(s.path, "/")
	return room
}

// imports lists the import paths and the names that the file gives them (the last element of the
// path by default).
func (s source) imports() map[string]string {
	names := map[string]string{}
	for _, spec := range s.Imports {
		imported, _ := strconv.Unquote(spec.Path.Value)
		names[imported] = path.Base(imported)
		if spec.Name != nil {
			names[imported] = spec.Name.Name
		}
	}
	return names
}

// tree is a checkout: its parsed Go files, and its other files, which are read on demand.
type tree struct {
	fs.FS
	*token.FileSet
	sources []source
}

// at formats the position of a node and a message about it.
func (t *tree) at(node ast.Node, format string, args ...any) string {
	position := t.Position(node.Pos())
	return fmt.Sprintf("%s:%d: %s", position.Filename, position.Line, fmt.Sprintf(format, args...))
}

// ignored reports whether a folder is no part of the sources.
func ignored(name string) bool {
	base := path.Base(name)
	return name == "build" || base == "testdata" || (strings.HasPrefix(base, ".") && name != ".")
}

// load parses every Go file of a tree, whatever its build constraints.
func load(t *testing.T, files fs.FS) *tree {
	t.Helper()
	loaded := &tree{FS: files, FileSet: token.NewFileSet()}
	err := fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && ignored(name):
			return fs.SkipDir
		case entry.IsDir() || path.Ext(name) != ".go":
			return nil
		}
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(loaded.FileSet, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		loaded.sources = append(loaded.sources, source{name, file})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return loaded
}
