// Command generate writes the Go code for protocols/proto: the messages as gogofaster generates
// them, the ProtoReflect methods that let ttrpc carry them, the names of the services and the table
// of their methods. It needs no protoc: protocompile compiles the .proto files, and gogo's
// generator is called as a library. Run it at the root of the repository:
//
//	go run ./protocols/internal/generate [-proto DIR] [-out DIR]
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	protoDir := flag.String("proto", "protocols/proto", "folder of the .proto files")
	out := flag.String("out", "protocols", "folder that gets one folder a package")
	flag.Parse()
	if err := run(context.Background(), *protoDir, *out); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, protoDir, out string) error {
	files, err := generate(ctx, protoDir)
	if err != nil {
		return err
	}
	for name, content := range files {
		path := filepath.Join(out, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("make the package's folder: %w", err)
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			return fmt.Errorf("write generated code: %w", err)
		}
	}
	return nil
}
