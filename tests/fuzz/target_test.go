package fuzz

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// top is the top of the checkout, relative to this package's folder, where go test runs.
const top = "../.."

// target is a fuzz function FuzzX.
type target struct{ dir, name string }

// String returns a name that is unique in the repository, such as host/qmp.FuzzLine.
func (x target) String() string { return x.dir + "." + x.name }

// listTargets finds every target in the packages' test files, in the order of their names.
func listTargets() ([]target, error) {
	list := exec.Command("go", "list", "-f", `{{.Dir}}{{range .TestGoFiles}} {{.}}{{end}}{{range .XTestGoFiles}} {{.}}{{end}}`, "./...")
	list.Dir = top
	var stderr bytes.Buffer
	list.Stderr = &stderr
	packages, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w: %s", err, &stderr)
	}
	root, err := filepath.Abs(top)
	if err != nil {
		return nil, err
	}
	var all []target
	for line := range strings.Lines(string(packages)) {
		files := strings.Fields(line)
		dir, err := filepath.Rel(root, files[0])
		if err != nil {
			return nil, err
		}
		for _, file := range files[1:] {
			names, err := targetsIn(filepath.Join(files[0], file))
			if err != nil {
				return nil, err
			}
			for _, name := range names {
				all = append(all, target{dir, name})
			}
		}
	}
	slices.SortFunc(all, func(a, b target) int { return strings.Compare(a.String(), b.String()) })
	return all, nil
}

func targetsIn(file string) (names []string, err error) {
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, decl := range parsed.Decls {
		function, ok := decl.(*ast.FuncDecl)
		if ok && function.Recv == nil && strings.HasPrefix(function.Name.Name, "Fuzz") {
			names = append(names, function.Name.Name)
		}
	}
	return names, nil
}

func TestCampaignKnowsTheTargetsOfEveryRoom(t *testing.T) {
	all, err := listTargets()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []target{{"agent/blockdev", "FuzzUevent"}, {"host/vhostvsock", "FuzzDriver"}, {"protocols/gogocodec", "FuzzUnmarshal"}, {"rootfs/kernel", "FuzzModinfo"}} {
		if !slices.Contains(all, want) {
			t.Errorf("want %v\ngot  %v", want, all)
		}
	}
}
