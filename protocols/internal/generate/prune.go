package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"strings"
)

// prune removes from a generated file everything that only serves gogo's registries and reflection:
// descriptors, registration, and the XXX methods. The registries would keep every message and the
// text format linked, a fifth of a small agent, and nothing here uses them.
func prune(name string, source []byte) ([]byte, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, source, parser.ParseComments)
	if err != nil {
		return nil, fmt.Errorf("parse generated code: %w", err)
	}
	var kept bytes.Buffer
	end := 0
	for _, decl := range file.Decls {
		if !registration(decl) {
			continue
		}
		kept.Write(source[end:fset.Position(start(decl)).Offset])
		end = fset.Position(decl.End()).Offset
	}
	kept.Write(source[end:])
	formatted, err := format.Source(kept.Bytes())
	if err != nil {
		return nil, fmt.Errorf("format %s: %w", name, err)
	}
	return formatted, nil
}

// registration reports whether a declaration only serves the registries or reflection.
func registration(decl ast.Decl) bool {
	switch d := decl.(type) {
	case *ast.FuncDecl:
		switch name := d.Name.Name; name {
		case "init", "Descriptor", "EnumDescriptor":
			return true
		default:
			return strings.HasPrefix(name, "XXX_")
		}
	case *ast.GenDecl:
		value, ok := d.Specs[0].(*ast.ValueSpec)
		if !ok {
			return false
		}
		name := value.Names[0].Name
		return strings.HasPrefix(name, "fileDescriptor_") || strings.HasPrefix(name, "xxx_messageInfo_")
	}
	return false
}

// start returns the position at which a declaration begins, including its comment.
func start(decl ast.Decl) token.Pos {
	switch d := decl.(type) {
	case *ast.FuncDecl:
		if d.Doc != nil {
			return d.Doc.Pos()
		}
	case *ast.GenDecl:
		if d.Doc != nil {
			return d.Doc.Pos()
		}
	}
	return decl.Pos()
}
