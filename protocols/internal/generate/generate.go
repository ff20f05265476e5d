package main

import (
	"context"
	"fmt"
	"go/format"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/linker"
	_ "github.com/gogo/protobuf/plugin/marshalto" // the three plugins that make gogofaster fast; they register themselves
	_ "github.com/gogo/protobuf/plugin/size"
	_ "github.com/gogo/protobuf/plugin/unmarshal"
	gogoproto "github.com/gogo/protobuf/proto"
	gogodescriptor "github.com/gogo/protobuf/protoc-gen-gogo/descriptor"
	"github.com/gogo/protobuf/protoc-gen-gogo/generator"
	plugin "github.com/gogo/protobuf/protoc-gen-gogo/plugin"
	"github.com/gogo/protobuf/vanity"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// modulePrefix is the beginning of every go_package option. The rest is the package's directory.
const modulePrefix = "github.com/directvol/directvol/protocols/"

// generate returns the generated files by their paths below protocols/.
func generate(ctx context.Context, protoDir string) (map[string][]byte, error) {
	compiled, err := compile(ctx, protoDir)
	if err != nil {
		return nil, err
	}
	generated := map[string][]byte{}
	for _, p := range packagesOf(compiled) {
		request, err := codeGeneratorRequest(p.files)
		if err != nil {
			return nil, err
		}
		files, err := messages(request)
		if err != nil {
			return nil, err
		}
		for name, source := range p.companions() {
			if files[name], err = format.Source(source); err != nil {
				return nil, fmt.Errorf("format %s: %w", name, err)
			}
		}
		maps.Copy(generated, files)
	}
	return generated, nil
}

// compile returns the .proto files of a directory, sorted by name, with their comments.
func compile(ctx context.Context, protoDir string) (linker.Files, error) {
	paths, err := filepath.Glob(filepath.Join(protoDir, "*.proto"))
	if err != nil {
		return nil, err
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("no .proto file in %q: run at the root of the repository, or set -proto", protoDir)
	}
	for i := range paths {
		paths[i] = filepath.Base(paths[i])
	}
	compiler := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{protoDir}}),
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	compiled, err := compiler.Compile(ctx, paths...)
	if err != nil {
		return nil, fmt.Errorf("compile %s: %w", protoDir, err)
	}
	return compiled, nil
}

// goPackage is one package to generate. gogo's generator processes one package at a time.
type goPackage struct {
	name  string
	files []protoreflect.FileDescriptor
}

// packagesOf groups files by the package in their go_package option.
func packagesOf(compiled linker.Files) []goPackage {
	files := map[string][]protoreflect.FileDescriptor{}
	for _, file := range compiled {
		name := path.Base(goPackageOf(file))
		files[name] = append(files[name], file)
	}
	var packages []goPackage
	for _, name := range slices.Sorted(maps.Keys(files)) {
		packages = append(packages, goPackage{name, files[name]})
	}
	return packages
}

// goPackageOf returns the import path of the Go package for a file's messages.
func goPackageOf(file protoreflect.FileDescriptor) string {
	return protodesc.ToFileDescriptorProto(file).GetOptions().GetGoPackage()
}

// codeGeneratorRequest returns the request that protoc would send to its plugin: every file comes
// after those that it imports.
func codeGeneratorRequest(files []protoreflect.FileDescriptor) (*plugin.CodeGeneratorRequest, error) {
	request := &plugin.CodeGeneratorRequest{}
	added := map[string]bool{}
	var add func(file protoreflect.FileDescriptor) error
	add = func(file protoreflect.FileDescriptor) error {
		if added[file.Path()] {
			return nil
		}
		added[file.Path()] = true
		for i := range file.Imports().Len() {
			if err := add(file.Imports().Get(i).FileDescriptor); err != nil {
				return err
			}
		}
		wire, err := proto.Marshal(protodesc.ToFileDescriptorProto(file))
		if err != nil {
			return fmt.Errorf("encode descriptor of %s: %w", file.Path(), err)
		}
		descriptor := &gogodescriptor.FileDescriptorProto{}
		if err := gogoproto.Unmarshal(wire, descriptor); err != nil {
			return fmt.Errorf("decode descriptor of %s: %w", file.Path(), err)
		}
		request.ProtoFile = append(request.ProtoFile, descriptor)
		return nil
	}
	for _, file := range files {
		request.FileToGenerate = append(request.FileToGenerate, file.Path())
		if err := add(file); err != nil {
			return nil, err
		}
	}
	return request, nil
}

// messages runs gogo's generator with the options of protoc-gen-gogofaster: decoding skips unknown
// fields and does not keep them.
func messages(request *plugin.CodeGeneratorRequest) (map[string][]byte, error) {
	for _, choose := range []func(*gogodescriptor.FileDescriptorProto){
		vanity.TurnOnMarshalerAll, vanity.TurnOnSizerAll, vanity.TurnOnUnmarshalerAll,
		vanity.TurnOffGoUnrecognizedAll, vanity.TurnOffGoUnkeyedAll, vanity.TurnOffGoSizecacheAll,
		vanity.TurnOffGoStringerAll, // fmt prints the struct instead; otherwise gogo's text format would be linked
	} {
		vanity.ForEachFile(request.ProtoFile, choose)
	}
	g := generator.New()
	g.Request = request
	g.CommandLineParameters("")
	g.WrapTypes()
	g.SetPackageNames()
	g.BuildTypeNameMap()
	g.GenerateAllFiles()
	files := map[string][]byte{}
	for _, file := range g.Response.File {
		name, ok := strings.CutPrefix(file.GetName(), modulePrefix)
		if !ok {
			return nil, fmt.Errorf("generated %s lies outside %s: set go_package", file.GetName(), modulePrefix)
		}
		pruned, err := prune(name, []byte(file.GetContent()))
		if err != nil {
			return nil, err
		}
		files[name] = pruned
	}
	return files, nil
}
