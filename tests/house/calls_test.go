package house

import (
	"go/ast"
	"slices"
	"strconv"
)

// noSleep finds time.Sleep, called or passed on, under whatever name the file knows the package. Where testing/synctest is at work a
// sleep waits until nothing else can happen, and takes no time.
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

// mountPackage is where it is known what a number of a mount, a filesystem or a disk proves, and what it does not.
const mountPackage = "agent/mount"

// deviceFields are stat's st_dev, as package unix has it: btrfs has there what no disk has, and the next disk has the number of the one
// before.
var deviceFields = []string{"Dev", "Dev_major", "Dev_minor"}

// mountsByNumber finds in the agent who reads st_dev or mountinfo for himself.
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

// skipsSayWhy finds SkipNow, and Skip without a word, in files that use package testing.
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
