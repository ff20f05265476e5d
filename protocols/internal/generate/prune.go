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

// prune cuts what serves gogo's registries and its reflection from a generated file: descriptors, registration, the XXX methods. The registries
// keep every message and the text format linked, a fifth of a small agent, and nothing here asks them.
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

// registration reports whether a declaration is there for the registries or for reflection alone.
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

// start is where a declaration begins, its comment included.
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
