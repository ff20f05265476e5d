package house

import (
	"fmt"
	"io/fs"
	"regexp"
	"strings"
)

// directives returns go.mod's directives, one "verb argument…" each, with blocks unfolded. Comments stay: "// indirect" is one.
func directives(t *tree) ([]string, error) {
	text, err := fs.ReadFile(t, "go.mod")
	if err != nil {
		return nil, err
	}
	var all []string
	block := ""
	for line := range strings.Lines(string(text)) {
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
	return all, nil
}

// ourGo is the version that go.mod names: any patch of it will do.
var ourGo = regexp.MustCompile(`^go 1\.26(\.\d+)?$`)

func goVersion(t *tree) (broken []string) {
	all, err := directives(t)
	if err != nil {
		return []string{err.Error()}
	}
	found := false
	for _, line := range all {
		found = found || ourGo.MatchString(line)
		if strings.HasPrefix(line, "toolchain ") {
			broken = append(broken, "go.mod: "+line+": whoever builds chooses the toolchain")
		}
	}
	if !found {
		broken = append(broken, "go.mod: no line go 1.26 or go 1.26.x")
	}
	return broken
}

// dependenciesExplained wants a row in CONTRIBUTING.md, with the module in backticks, for each module that go.mod requires directly.
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
	for _, line := range all {
		words := strings.Fields(line)
		if words[0] == "require" && !strings.Contains(line, "// indirect") && !explained[words[1]] {
			broken = append(broken, fmt.Sprintf("go.mod: no row of CONTRIBUTING.md says what `%s` is for", words[1]))
		}
	}
	return broken
}
