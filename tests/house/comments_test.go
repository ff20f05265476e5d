package house

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"slices"
	"strings"
	"unicode/utf8"
)

// packageComments requires one file of each package to begin with a package comment. A folder with
// only tests needs a doc.go.
func packageComments(t *tree) (broken []string) {
	said := map[string]bool{}
	for _, file := range t.sources {
		said[file.dir()] = said[file.dir()] || saysWhatItIs(file)
	}
	for dir, ok := range said {
		if !ok {
			broken = append(broken, dir+`: no package comment that begins with "Package <name> " (or "Command <name> " for a program)`)
		}
	}
	slices.Sort(broken)
	return broken
}

func saysWhatItIs(file source) bool {
	if file.test() || file.Doc == nil {
		return false
	}
	begins := "Package " + file.Name.Name + " "
	if file.Name.Name == "main" {
		begins = "Command "
	}
	return strings.HasPrefix(file.Doc.Text(), begins)
}

// exportedComments requires a comment on each exported identifier. For constants and variables a
// comment on their group is enough.
func exportedComments(t *tree) (broken []string) {
	for _, file := range t.sources {
		if file.test() || file.generated() || file.Name.Name == "main" {
			continue
		}
		for _, decl := range file.Decls {
			for _, name := range undocumented(decl) {
				broken = append(broken, t.at(name, "%s has no comment", name.Name))
			}
		}
	}
	return broken
}

func undocumented(decl ast.Decl) (names []*ast.Ident) {
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		if decl.Name.IsExported() && decl.Doc == nil && (decl.Recv == nil || receiver(decl).IsExported()) {
			return []*ast.Ident{decl.Name}
		}
	case *ast.GenDecl:
		for _, spec := range decl.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				if spec.Name.IsExported() && decl.Doc == nil && spec.Doc == nil {
					names = append(names, spec.Name)
				}
			case *ast.ValueSpec:
				if decl.Doc == nil && spec.Doc == nil && spec.Comment == nil {
					names = append(names, slices.DeleteFunc(slices.Clone(spec.Names), func(n *ast.Ident) bool { return !n.IsExported() })...)
				}
			}
		}
	}
	return names
}

// receiver returns the name of a method's type.
func receiver(method *ast.FuncDecl) *ast.Ident {
	typ := method.Recv.List[0].Type
	for {
		switch t := typ.(type) {
		case *ast.StarExpr:
			typ = t.X
		case *ast.IndexExpr:
			typ = t.X
		case *ast.IndexListExpr:
			typ = t.X
		case *ast.Ident:
			return t
		default:
			return ast.NewIdent("_")
		}
	}
}

// screen is the maximum number of lines of a function, from its first line to its closing brace.
const screen = 70

func shortFunctions(t *tree) (broken []string) {
	for _, file := range t.sources {
		if file.test() || file.generated() {
			continue
		}
		for _, decl := range file.Decls {
			function, ok := decl.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if lines := t.line(function.End()) - t.line(function.Pos()) + 1; lines > screen {
				broken = append(broken, t.at(function, "%s has %d lines, more than %d", function.Name.Name, lines, screen))
			}
		}
	}
	return broken
}

func (t *tree) line(p token.Pos) int { return t.Position(p).Line }

// commentColumns is where comments wrap. A tab counts as four columns.
const commentColumns = 100

// wrappedComments refuses a line of a comment that is longer than commentColumns. Some lines may be
// longer: a comment behind code, a line with its own format (after a tab), the output of an
// Example, and a line of one word.
func wrappedComments(t *tree) (broken []string) {
	for _, file := range t.sources {
		if file.generated() {
			continue
		}
		text, err := fs.ReadFile(t, file.path)
		if err != nil {
			return []string{err.Error()}
		}
		output := false // of an Example
		for number, line := range strings.Split(string(text), "\n") {
			comment := strings.TrimLeft(line, "\t")
			words, isComment := strings.CutPrefix(comment, "// ")
			output = isComment && (output || strings.HasPrefix(words, "Output:"))
			columns := 4*(len(line)-len(comment)) + utf8.RuneCountInString(comment)
			if isComment && !output && columns > commentColumns && strings.Contains(words, " ") {
				broken = append(broken, fmt.Sprintf("%s:%d: a comment of %d columns: wrap it at %d", file.path, number+1, columns, commentColumns))
			}
		}
	}
	return broken
}
