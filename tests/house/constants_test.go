package house

import (
	"go/ast"
	"go/constant"
	"go/token"
	"math"
	"strings"
)

// constants are the constants of the tree's packages, by "folder.name", except those in tests and
// in functions.
type constants map[string]declared

// declared is the expression of a constant, and its file.
type declared struct {
	ast.Expr
	source
}

// known are constants of other packages that our constants use.
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

// number returns a constant's value, and whether it is a duration, in nanoseconds. ok is false if
// the constant is no number, or uses something unknown.
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

// evaluate returns the value of an expression, or nil if it is unknown.
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

// selected evaluates a constant of another package.
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
		return constant.BinaryOp(x, token.QUO_ASSIGN, y) // integer division
	case token.ADD, token.SUB, token.MUL, token.OR, token.AND:
		return constant.BinaryOp(x, op, y)
	}
	return nil
}
