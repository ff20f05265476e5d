package house

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
)

// heldBy is the column with the tests that hold a promise.
const heldBy = "held by"

// testName matches the name of a test in backticks, with a subtest or without.
var testName = regexp.MustCompile("`((?:Test|Fuzz|Example|Benchmark)[A-Z]\\w*)(?:/([^`]+))?`")

// promisesAreHeld requires each table of the specification to have the column heldBy, and each row
// to name a test or a row of the bench there, or to say "no test". Tests that any page names must
// exist. (The bench's own tests check that its rows exist.)
func promisesAreHeld(t *tree) (broken []string) {
	all, broken := t.tables(specification)
	for _, one := range all {
		for _, r := range one.rows {
			by := r.cells[heldBy]
			if !testName.MatchString(by) && !strings.Contains(by, "row `") && !strings.Contains(by, "no test") {
				broken = append(broken, r.at+": what holds this? Name a test, a row of the bench, or write: no test")
			}
		}
	}
	pages, err := t.pages()
	if err != nil {
		return append(broken, err.Error())
	}
	tests := t.tests()
	for _, page := range pages {
		text, err := fs.ReadFile(t, page)
		if err != nil {
			return append(broken, err.Error())
		}
		for _, found := range testName.FindAllStringSubmatch(string(text), -1) {
			if in, ok := tests[found[1]]; !ok || found[2] != "" && !slices.ContainsFunc(in, func(s source) bool { return hasLiteral(s, found[2]) }) {
				broken = append(broken, fmt.Sprintf("%s: no test is called %s", page, strings.Trim(found[0], "`")))
			}
		}
	}
	return broken
}

// tests returns the files of each test, by the test's name.
func (t *tree) tests() map[string][]source {
	tests := map[string][]source{}
	for _, file := range t.sources {
		for _, decl := range file.Decls {
			if function, ok := decl.(*ast.FuncDecl); ok && file.test() && function.Recv == nil {
				tests[function.Name.Name] = append(tests[function.Name.Name], file)
			}
		}
	}
	return tests
}

// literals calls yield for each string literal of a file.
func literals(file source, yield func(*ast.BasicLit, string)) {
	ast.Inspect(file.File, func(node ast.Node) bool {
		if literal, ok := node.(*ast.BasicLit); ok && literal.Kind == token.STRING {
			if text, err := strconv.Unquote(literal.Value); err == nil {
				yield(literal, text)
			}
		}
		return true
	})
}

func hasLiteral(file source, want string) (has bool) {
	literals(file, func(_ *ast.BasicLit, text string) { has = has || text == want })
	return has
}

// specified compares the facts of the specification's tables with the code's.
func specified(t *tree) (broken []string) {
	if _, broken := t.tables(specification); broken != nil {
		return broken
	}
	for _, compare := range []rule{figures, settings, conditions, metricNames, methodCodes, sentinels, literalNames} {
		broken = append(broken, compare(t)...)
	}
	return broken
}

// bound matches the names of constants that are bounds.
var bound = regexp.MustCompile(`^[mM]ax[A-Z]`)

// figures requires each constant in a table to have the value stated there, and a row for each
// constant that is a duration or is named as a maximum.
func figures(t *tree) (broken []string) {
	all, named := constantsOf(t), map[string]bool{}
	for _, r := range t.rowsWith("constant") {
		for _, name := range r.names("constant") {
			named[name] = true
			want, _, ok := all.number(name)
			if got, err := figure(r.cells["value"]); !ok {
				broken = append(broken, fmt.Sprintf("%s: there is no constant %s, or it is no number", r.at, name))
			} else if err != nil || got != want {
				broken = append(broken, fmt.Sprintf("%s: %s is %d (durations in ns), not %s", r.at, name, want, r.cells["value"]))
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		_, duration, ok := all.number(name)
		isOurs := slices.Contains([]string{"agent", "host", "protocols"}, all[name].room()) && all[name].Name.Name != "mounttest"
		if isOurs && ok && !named[name] && (duration || bound.MatchString(name[strings.LastIndex(name, ".")+1:])) {
			broken = append(broken, fmt.Sprintf("%s: no row for the constant `%s`", specification, name))
		}
	}
	return broken
}

// units are the possible units of a figure; durations are in nanoseconds.
var units = map[string]float64{
	"": 1, "ms": 1e6, "s": 1e9, "min": 60e9, "h": 3600e9, "d": 24 * 3600e9, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50,
}

// figure parses a number with its unit, such as 200 ms.
func figure(cell string) (int64, error) {
	number, unit, _ := strings.Cut(cell, " ")
	value, err := strconv.ParseFloat(strings.ReplaceAll(number, ",", ""), 64)
	factor, ok := units[unit]
	if err == nil && !ok {
		err = fmt.Errorf("unknown unit %q", unit)
	}
	return int64(value * factor), err
}

// agentProgram is the folder with the agent's settings.
const agentProgram = "agent/cmd/directvol-agent"

// settings compares the table of settings with the agent's options, and with their default
// durations.
func settings(t *tree) (broken []string) {
	rows, code := map[string]string{}, map[string]bool{}
	for _, r := range t.rowsWith("kernel option") {
		rows[strings.Join(append(r.names("kernel option"), r.names("flag")...), " ")] = r.cells["default"]
	}
	all := constantsOf(t)
	for _, file := range t.sources {
		if file.dir() != agentProgram || file.test() {
			continue
		}
		ast.Inspect(file.File, func(node ast.Node) bool {
			list, ok := node.(*ast.CompositeLit)
			if !ok {
				return true
			}
			if array, ok := list.Type.(*ast.ArrayType); ok && isName(array.Elt, "option") {
				for _, element := range list.Elts {
					fields := element.(*ast.CompositeLit).Elts
					code["agent."+all.text(fields[1], file)+" -"+all.text(fields[0], file)] = true
				}
			}
			if isName(list.Type, "settings") {
				for _, element := range list.Elts {
					if v, duration := all.evaluate(element.(*ast.KeyValueExpr).Value, file); duration {
						isShown := func(cell string) bool {
							got, err := figure(cell)
							return err == nil && fmt.Sprint(got) == v.ExactString()
						}
						if !slices.ContainsFunc(slices.Collect(maps.Values(rows)), isShown) {
							broken = append(broken, t.at(element, "no setting of the specification has this default"))
						}
					}
				}
			}
			return true
		})
	}
	return append(broken, differ("setting", slices.Collect(maps.Keys(rows)), slices.Collect(maps.Keys(code)))...)
}

// text returns the value of a string literal or of a string constant.
func (all constants) text(expr ast.Expr, in source) string {
	if name, ok := expr.(*ast.Ident); ok {
		expr = all[in.dir()+"."+name.Name].Expr
	}
	if literal, ok := expr.(*ast.BasicLit); ok {
		text, _ := strconv.Unquote(literal.Value)
		return text
	}
	return ""
}

// conditions compares the table of conditions with the agent's reasons, and their statuses with
// those in the agent's code.
func conditions(t *tree) (broken []string) {
	var rows, code []string
	statuses := map[string]string{}
	for _, r := range t.rowsWith("reason") {
		for _, reason := range r.names("reason") {
			rows = append(rows, reason)
			statuses[reason] = strings.ReplaceAll(strings.ToLower(r.cells["status"]), "_", "")
		}
	}
	all := constantsOf(t)
	for name := range all {
		if strings.HasPrefix(name, "agent/health.Reason") {
			code = append(code, all.text(all[name].Expr, all[name].source))
		}
	}
	for _, file := range t.sources {
		if file.dir() != "agent/health" || file.test() {
			continue
		}
		ast.Inspect(file.File, func(node ast.Node) bool {
			var list []ast.Expr
			switch n := node.(type) {
			case *ast.CallExpr:
				list = n.Args
			case *ast.CompositeLit:
				list = n.Elts
			}
			for i := 1; i < len(list); i++ {
				status, isStatus := list[i-1].(*ast.Ident)
				reason, isReason := list[i].(*ast.Ident)
				if !isStatus || !isReason || !strings.HasPrefix(reason.Name, "Reason") {
					continue
				}
				if said := statuses[strings.TrimPrefix(reason.Name, "Reason")]; !strings.Contains(said, strings.ToLower(status.Name)) {
					broken = append(broken, t.at(node, "%s has status %s, the specification says %q", reason.Name, status.Name, said))
				}
			}
			return true
		})
	}
	return append(broken, differ("reason", rows, code)...)
}

// metricPrefix matches the names of the agent's metrics.
var metricPrefix = regexp.MustCompile(`^directvol_agent_[a-z_]+$`)

func metricNames(t *tree) []string {
	var rows, code []string
	for _, r := range t.rowsWith("metric") {
		rows = append(rows, r.names("metric")...)
	}
	for _, file := range t.sources {
		if file.room() == "agent" && !file.test() {
			literals(file, func(_ *ast.BasicLit, text string) {
				if metricPrefix.MatchString(text) {
					code = append(code, text)
				}
			})
		}
	}
	return differ("metric", rows, code)
}

// methodCodes compares the calls in the table of codes with the methods that the agent registers,
// and requires that the codes exist.
func methodCodes(t *tree) (broken []string) {
	var rows, code []string
	exist := map[string]bool{}
	for c := codes.OK; c <= codes.Unauthenticated; c++ {
		exist[strings.ToLower(c.String())] = true
	}
	for _, r := range t.rowsWith("call") {
		rows = append(rows, r.names("call")...)
		for _, name := range r.names("code") {
			if !exist[strings.ToLower(strings.ReplaceAll(name, "_", ""))] {
				broken = append(broken, fmt.Sprintf("%s: there is no code %s", r.at, name))
			}
		}
	}
	for _, file := range t.sources {
		if file.room() != "agent" || file.test() || file.generated() {
			continue
		}
		ast.Inspect(file.File, func(node ast.Node) bool {
			if pair, ok := node.(*ast.KeyValueExpr); ok && registers(pair.Value) {
				if key, ok := pair.Key.(*ast.BasicLit); ok {
					name, _ := strconv.Unquote(key.Value)
					code = append(code, name)
				}
			}
			return true
		})
	}
	return append(broken, differ("call", rows, code)...)
}

// registers reports whether an expression is an entry of the server's table of methods.
func registers(expr ast.Expr) bool {
	call, ok := expr.(*ast.CompositeLit)
	return ok && slices.ContainsFunc(call.Elts, func(element ast.Expr) bool {
		field, ok := element.(*ast.KeyValueExpr)
		return ok && (isName(field.Key, "Answer") || isName(field.Key, "Stream"))
	})
}

// sentinels compares the table of errors with the exported error variables of host's packages.
func sentinels(t *tree) []string {
	var rows, code []string
	for _, r := range t.rowsWith("error") {
		rows = append(rows, r.names("error")...)
	}
	for _, file := range t.sources {
		if file.room() != "host" || file.test() {
			continue
		}
		for _, decl := range file.Decls {
			group, ok := decl.(*ast.GenDecl)
			if !ok || group.Tok != token.VAR {
				continue
			}
			for _, spec := range group.Specs {
				for _, name := range spec.(*ast.ValueSpec).Names {
					if strings.HasPrefix(name.Name, "Err") {
						code = append(code, file.Name.Name+"."+name.Name)
					}
				}
			}
		}
	}
	return differ("error", rows, code)
}

// literalNames requires that each file and variable in a table occurs in a string of some program.
func literalNames(t *tree) (broken []string) {
	var all strings.Builder
	for _, file := range t.sources {
		if !file.test() {
			literals(file, func(_ *ast.BasicLit, text string) { fmt.Fprintln(&all, text) })
		}
	}
	for _, column := range []string{"file", "variable"} {
		for _, r := range t.rowsWith(column) {
			for _, name := range r.names(column) {
				if !strings.Contains(all.String(), name) {
					broken = append(broken, fmt.Sprintf("%s: no program names %s", r.at, name))
				}
			}
		}
	}
	return broken
}

// differ returns the names that are only in the rows, and those that are only in the code.
func differ(what string, rows, code []string) (broken []string) {
	for _, name := range slices.Compact(slices.Sorted(slices.Values(rows))) {
		if !slices.Contains(code, name) {
			broken = append(broken, fmt.Sprintf("%s: the code has no %s %s", specification, what, name))
		}
	}
	for _, name := range slices.Compact(slices.Sorted(slices.Values(code))) {
		if !slices.Contains(rows, name) {
			broken = append(broken, fmt.Sprintf("%s: no row for the %s %s", specification, what, name))
		}
	}
	return broken
}
