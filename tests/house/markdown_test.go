package house

import (
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strings"
)

// specification is the page whose tables are compared with the code.
const specification = "docs/SPECIFICATION.md"

// table is a table of a Markdown page.
type table struct {
	header []string
	rows   []row
}

// row is a line of a table.
type row struct {
	at    string // page:line
	cells map[string]string
}

// names returns the words in backticks in a cell of the row.
func (r row) names(column string) (names []string) {
	for i, part := range strings.Split(r.cells[column], "`") {
		if i%2 == 1 {
			names = append(names, part)
		}
	}
	return names
}

// tables reads a page's tables. A row must have as many cells as its header.
func (t *tree) tables(page string) (all []table, broken []string) {
	text, err := fs.ReadFile(t, page)
	if err != nil {
		return nil, []string{err.Error()}
	}
	var now *table
	for i, line := range strings.Split(string(text), "\n") {
		at := fmt.Sprintf("%s:%d", page, i+1)
		cells := cellsOf(line)
		switch {
		case cells == nil:
			now = nil
		case now == nil:
			all = append(all, table{header: cells})
			now = &all[len(all)-1]
		case strings.Trim(line, "|-: ") == "":
		case len(cells) != len(now.header):
			broken = append(broken, fmt.Sprintf("%s: %d cells below a header of %d", at, len(cells), len(now.header)))
		default:
			r := row{at: at, cells: map[string]string{}}
			for j, cell := range cells {
				r.cells[now.header[j]] = cell
			}
			now.rows = append(now.rows, r)
		}
	}
	return all, broken
}

// cellsOf splits a line of a table. It returns nil for any other line.
func cellsOf(line string) []string {
	inside, ok := strings.CutPrefix(strings.TrimSpace(line), "|")
	if !ok {
		return nil
	}
	cells := strings.Split(strings.TrimSuffix(inside, "|"), "|")
	for i := range cells {
		cells[i] = strings.TrimSpace(cells[i])
	}
	return cells
}

// rowsWith returns the rows of all tables that have a column.
func (t *tree) rowsWith(column string) (rows []row) {
	all, _ := t.tables(specification)
	for _, one := range all {
		for _, name := range one.header {
			if name == column {
				rows = append(rows, one.rows...)
			}
		}
	}
	return rows
}

// pages returns the paths of all Markdown pages.
func (t *tree) pages() (pages []string, err error) {
	err = fs.WalkDir(t, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && ignored(name):
			return fs.SkipDir
		case path.Ext(name) == ".md":
			pages = append(pages, name)
		}
		return nil
	})
	return pages, err
}

var link = regexp.MustCompile(`\]\(([^)#\s]+)[^)]*\)`)

// linksLead requires a file for each link of a page that does not lead to another host.
func linksLead(t *tree) (broken []string) {
	pages, err := t.pages()
	if err != nil {
		return []string{err.Error()}
	}
	for _, page := range pages {
		text, err := fs.ReadFile(t, page)
		if err != nil {
			return []string{err.Error()}
		}
		for _, found := range link.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(found[1], ":") {
				continue
			}
			if _, err := fs.Stat(t, path.Join(path.Dir(page), found[1])); err != nil {
				broken = append(broken, fmt.Sprintf("%s: a link leads to %s: %v", page, found[1], err))
			}
		}
	}
	return broken
}

// example is the file with the program of README.md. The tests of its package compile it.
const example = "host/sandbox/example_program_test.go"

// readmeProgram requires exactly one program in README.md, equal to the example.
func readmeProgram(t *tree) (broken []string) {
	page, err := fs.ReadFile(t, "README.md")
	if err != nil {
		return []string{err.Error()}
	}
	code, err := fs.ReadFile(t, example)
	if err != nil {
		return []string{err.Error()}
	}
	want := strings.NewReplacer("package sandbox_test", "package main", "func Example()", "func main()").Replace(string(code))
	blocks := strings.Split(string(page), "```go\n")
	if len(blocks) != 2 {
		return []string{fmt.Sprintf("README.md: %d programs between ```go and ```, and one is wanted: that of %s", len(blocks)-1, example)}
	}
	got, _, _ := strings.Cut(blocks[1], "```")
	wanted, has := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i, line := range has {
		if i >= len(wanted) || line != wanted[i] {
			return []string{fmt.Sprintf("README.md: line %d of its program is not that of %s: %s", i+1, example, line)}
		}
	}
	if len(has) < len(wanted) {
		return []string{fmt.Sprintf("README.md: its program ends before line %d of %s", len(has)+1, example)}
	}
	return nil
}
