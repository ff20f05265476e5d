package house

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// modFiles returns the paths of all go.mod files: the one at the top, and those of the modules
// below it.
func (t *tree) modFiles() (files []string, err error) {
	files = []string{"go.mod"}
	err = fs.WalkDir(t, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && ignored(name):
			return fs.SkipDir
		case path.Base(name) == "go.mod" && name != "go.mod":
			files = append(files, name)
		}
		return nil
	})
	return files, err
}

// directive is a directive of a go.mod.
type directive struct{ file, text string }

// directives returns the directives of all go.mod files, each as "verb argument…", with blocks
// unfolded. It keeps comments, because "// indirect" is one.
func directives(t *tree) (all []directive, err error) {
	files, err := t.modFiles()
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, err := fs.ReadFile(t, file)
		if err != nil {
			return nil, err
		}
		for _, d := range directivesOf(string(text)) {
			all = append(all, directive{file, d})
		}
	}
	return all, nil
}

func directivesOf(text string) (all []string) {
	block := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch verb, opens := strings.CutSuffix(line, "("); {
		case line == "" || strings.HasPrefix(line, "//"):
		case opens:
			block = strings.TrimSpace(verb) + " "
		case line == ")":
			block = ""
		default:
			all = append(all, block+line)
		}
	}
	return all
}

// ourGo matches the Go version that a go.mod may name: any patch release.
var ourGo = regexp.MustCompile(`^go 1\.26(\.\d+)?$`)

func goVersion(t *tree) (broken []string) {
	all, err := directives(t)
	if err != nil {
		return []string{err.Error()}
	}
	files, err := t.modFiles()
	if err != nil {
		return []string{err.Error()}
	}
	found := map[string]bool{}
	for _, d := range all {
		found[d.file] = found[d.file] || ourGo.MatchString(d.text)
		if strings.HasPrefix(d.text, "toolchain ") {
			broken = append(broken, d.file+": "+d.text+": whoever builds chooses the toolchain")
		}
	}
	for _, file := range files {
		if !found[file] {
			broken = append(broken, file+": no line go 1.26 or go 1.26.x")
		}
	}
	return broken
}

// dependenciesExplained requires a row in CONTRIBUTING.md, with the module in backticks, for each
// module that a go.mod requires directly.
func dependenciesExplained(t *tree) (broken []string) {
	all, err := directives(t)
	if err != nil {
		return []string{err.Error()}
	}
	text, err := fs.ReadFile(t, "CONTRIBUTING.md")
	if err != nil {
		return []string{err.Error()}
	}
	explained := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "|") {
			for i, part := range strings.Split(line, "`") {
				explained[part] = explained[part] || i%2 == 1
			}
		}
	}
	for _, d := range all {
		words := strings.Fields(d.text)
		if words[0] == "require" && !strings.Contains(d.text, "// indirect") && !explained[words[1]] && words[1] != module {
			broken = append(broken, fmt.Sprintf("%s: no row of CONTRIBUTING.md says what `%s` is for", d.file, words[1]))
		}
	}
	return broken
}

// modulesBuildOnThisTree requires each module below the top to replace our module by this tree's
// folder, so that it uses neither a release of our packages nor the network.
func modulesBuildOnThisTree(t *tree) (broken []string) {
	files, err := t.modFiles()
	if err != nil {
		return []string{err.Error()}
	}
	all, err := directives(t)
	if err != nil {
		return []string{err.Error()}
	}
	for _, file := range files[1:] {
		up := strings.Repeat("../", strings.Count(path.Dir(file), "/")+1)
		want := directive{file, "replace " + module + " => " + strings.TrimSuffix(up, "/")}
		if !slices.Contains(all, want) {
			broken = append(broken, fmt.Sprintf("%s: no line %s", file, want.text))
		}
	}
	return broken
}

// This test tells the author of a change about a broken package in another module, because ./... at
// the top excludes that module.
func TestOtherModulesBuild(t *testing.T) {
	files, err := load(t, os.DirFS(top)).modFiles()
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files[1:] {
		vet := exec.Command("go", "vet", "./...")
		vet.Dir = filepath.Join(top, path.Dir(file))
		if out, err := vet.CombinedOutput(); err != nil {
			t.Errorf("%s: go vet: %v\n%s", file, err, out)
		}
	}
}
