package house

import (
	"go/ast"
	"slices"
	"strconv"
)

// noSleep finds uses of time.Sleep, under whatever name a file imports the package. It allows them
// with testing/synctest, where a sleep waits until nothing else can happen, and takes no time.
func noSleep(t *tree) (broken []string) {
	for _, file := range t.sources {
		name, imported := file.imports()["time"]
		if _, virtual := file.imports()["testing/synctest"]; !imported || virtual || file.generated() {
			continue
		}
		if name == "." {
			broken = append(broken, file.path+`: imports "time" as ., which hides what it uses`)
		}
		ast.Inspect(file.File, func(node ast.Node) bool {
			if selector, ok := node.(*ast.SelectorExpr); ok && selector.Sel.Name == "Sleep" && isName(selector.X, name) {
				broken = append(broken, t.at(node, "%s.Sleep: wait for what is to happen, not for a while", name))
			}
			return true
		})
	}
	return broken
}

// mountPackage is the package that knows what the number of a mount, a filesystem or a disk proves.
const mountPackage = "agent/mount"

// deviceFields are the names of stat's st_dev in package unix. The code must not use st_dev: in
// btrfs it is the number of no disk, and the kernel gives a disk's number to the next disk.
var deviceFields = []string{"Dev", "Dev_major", "Dev_minor"}

// mountsByNumber finds code of the agent outside mountPackage that reads st_dev or mountinfo.
func mountsByNumber(t *tree) (broken []string) {
	for _, file := range t.sources {
		if file.room() != "agent" || file.dir() == mountPackage {
			continue
		}
		if name, ok := file.imports()["github.com/moby/sys/mountinfo"]; ok {
			broken = append(broken, file.path+": imports "+name+": "+mountPackage+" reads it")
		}
		ast.Inspect(file.File, func(node ast.Node) bool {
			if selector, ok := node.(*ast.SelectorExpr); ok && slices.Contains(deviceFields, selector.Sel.Name) {
				broken = append(broken, t.at(node, "reads st_dev: mount.Identity says whose mount a file is in"))
			}
			return true
		})
	}
	return broken
}

// healthPackage is the package that makes conditions from the signals of a filesystem and its disk.
const healthPackage = "agent/health"

// conditionsAreMadeInHealth finds code of the agent that makes a condition outside package health,
// and imports that would give package health knowledge of volumes and storages. An empty condition
// is allowed.
func conditionsAreMadeInHealth(t *tree) (broken []string) {
	for _, file := range t.sources {
		if file.room() != "agent" || file.test() {
			continue
		}
		if file.dir() == healthPackage {
			for _, above := range []string{"agent/volume", "agent/storage"} {
				if _, ok := file.imports()[module+"/"+above]; ok {
					broken = append(broken, file.path+": imports "+above+": "+healthPackage+" knows neither volume nor storage")
				}
			}
			continue
		}
		name, imported := file.imports()[module+"/"+healthPackage]
		ast.Inspect(file.File, func(node ast.Node) bool {
			if literal, ok := node.(*ast.CompositeLit); ok && imported && len(literal.Elts) > 0 && ofConditions(literal.Type, name) {
				broken = append(broken, t.at(node, "makes a condition: "+healthPackage+" does"))
			}
			return true
		})
	}
	return broken
}

// ofConditions reports whether a literal's type is health.Condition, or a list of them.
func ofConditions(of ast.Expr, health string) bool {
	if list, ok := of.(*ast.ArrayType); ok {
		of = list.Elt
	}
	selector, ok := of.(*ast.SelectorExpr)
	return ok && selector.Sel.Name == "Condition" && isName(selector.X, health)
}

// skipsSayWhy finds SkipNow, and Skip without a reason, in files that use package testing.
func skipsSayWhy(t *tree) (broken []string) {
	for _, file := range t.sources {
		if _, tests := file.imports()["testing"]; !tests {
			continue
		}
		ast.Inspect(file.File, func(node ast.Node) bool {
			if call, ok := node.(*ast.CallExpr); ok && isMuteSkip(call) {
				broken = append(broken, t.at(node, "skips without a word: say why, and how to run the test"))
			}
			return true
		})
	}
	return broken
}

func isMuteSkip(call *ast.CallExpr) bool {
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	switch selector.Sel.Name {
	case "SkipNow":
		return true
	case "Skip", "Skipf":
		return len(call.Args) == 0 || (len(call.Args) == 1 && isEmptyString(call.Args[0]))
	default:
		return false
	}
}

func isEmptyString(expr ast.Expr) bool {
	literal, ok := expr.(*ast.BasicLit)
	if !ok {
		return false
	}
	text, err := strconv.Unquote(literal.Value)
	return err == nil && text == ""
}

func isName(expr ast.Expr, name string) bool {
	ident, ok := expr.(*ast.Ident)
	return ok && ident.Name == name
}
