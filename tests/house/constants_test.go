package house

import (
	"go/ast"
	"go/constant"
	"go/token"
	"math"
	"strings"
)

// constants are the constants of the tree's packages, by "folder.name". Those of tests and of functions are left out.
type constants map[string]declared

// declared is a constant's expression, and the file that it stands in.
type declared struct {
	ast.Expr
	source
}

// known are the constants of other packages that ours are made of.
var known = map[string]int64{
	"time.Nanosecond": 1, "time.Microsecond": 1e3, "time.Millisecond": 1e6, "time.Second": 1e9, "time.Minute": 60e9, "time.Hour": 3600e9,
	"math.MaxInt32": math.MaxInt32, "math.MaxUint32": math.MaxUint32, "math.MaxInt64": math.MaxInt64,
}

func constantsOf(t *tree) constants {
	all := constants{}
	for _, file := range t.sources {
		if file.test() || file.generated() {
			continue
		}
		for _, decl := range file.Decls {
			group, ok := decl.(*ast.GenDecl)
			if !ok || group.Tok != token.CONST {
				continue
			}
			for _, spec := range group.Specs {
				for i, name := range spec.(*ast.ValueSpec).Names {
					if values := spec.(*ast.ValueSpec).Values; i < len(values) {
						all[file.dir()+"."+name.Name] = declared{values[i], file}
					}
				}
			}
		}
	}
	return all
}

// number returns a constant's value, and whether it is a duration, in nanoseconds. ok is false where it is no number, or made of what is not known here.
func (all constants) number(name string) (value int64, duration, ok bool) {
	found, there := all[name]
	if !there {
		return 0, false, false
	}
	v, duration := all.evaluate(found.Expr, found.source)
	if v == nil || v.Kind() != constant.Int {
		return 0, false, false
	}
	value, ok = constant.Int64Val(v)
	return value, duration, ok
}

// evaluate returns nil for what it does not know.
func (all constants) evaluate(expr ast.Expr, in source) (v constant.Value, duration bool) {
	switch e := expr.(type) {
	case *ast.BasicLit:
		return constant.MakeFromLiteral(e.Value, e.Kind, 0), false
	case *ast.ParenExpr:
		return all.evaluate(e.X, in)
	case *ast.Ident:
		if found, ok := all[in.dir()+"."+e.Name]; ok && found.Expr != expr {
			return all.evaluate(found.Expr, found.source)
		}
	case *ast.SelectorExpr:
		return all.selected(e, in)
	case *ast.BinaryExpr:
		x, left := all.evaluate(e.X, in)
		y, right := all.evaluate(e.Y, in)
		if x == nil || y == nil || x.Kind() != constant.Int || y.Kind() != constant.Int {
			return nil, false
		}
		return combined(x, e.Op, y), left || right
	}
	return nil, false
}

// selected is evaluate of another package's constant.
func (all constants) selected(e *ast.SelectorExpr, in source) (v constant.Value, duration bool) {
	for imported, name := range in.imports() {
		if !isName(e.X, name) {
			continue
		}
		if value, ok := known[imported+"."+e.Sel.Name]; ok {
			return constant.MakeInt64(value), imported == "time"
		}
		if found, ok := all[strings.TrimPrefix(imported, module+"/")+"."+e.Sel.Name]; ok {
			return all.evaluate(found.Expr, found.source)
		}
	}
	return nil, false
}

func combined(x constant.Value, op token.Token, y constant.Value) constant.Value {
	switch op {
	case token.SHL, token.SHR:
		if by, ok := constant.Uint64Val(y); ok && by < 64 {
			return constant.Shift(x, op, uint(by))
		}
	case token.QUO:
		return constant.BinaryOp(x, token.QUO_ASSIGN, y) // of integers
	case token.ADD, token.SUB, token.MUL, token.OR, token.AND:
		return constant.BinaryOp(x, op, y)
	}
	return nil
}
