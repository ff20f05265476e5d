package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
)

func TestCommittedCodeIsWhatTheProtosGenerate(t *testing.T) {
	fresh := t.TempDir()
	if err := run(t.Context(), "../../proto", fresh); err != nil {
		t.Fatal(err)
	}
	want, got := generatedIn(t, fresh), generatedIn(t, "../..")
	for name, content := range want {
		if !bytes.Equal(content, got[name]) {
			t.Errorf("%s is stale: run go run ./protocols/internal/generate", name)
		}
		if !bytes.HasPrefix(content, []byte("// Code generated ")) || !bytes.Contains(content, []byte("DO NOT EDIT.\n")) {
			t.Errorf("%s does not say that it is generated", name)
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("%s is generated no more: remove it", name)
		}
	}
}

// generatedIn returns the .pb.go files of the packages below a directory.
func generatedIn(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	names, err := fs.Glob(os.DirFS(dir), "*/*.pb.go")
	if err != nil || len(names) == 0 {
		t.Fatalf("no generated file in %s: %v", dir, err)
	}
	files := map[string][]byte{}
	for _, name := range names {
		if files[name], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// testdata/wire.txt was written by hand from the protocol, not from the .proto files.
func TestNumbersOfTheWireNeverMove(t *testing.T) {
	frozen, err := os.ReadFile("../../proto/testdata/wire.txt")
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Split(strings.TrimSpace(string(frozen)), "\n")
	slices.Sort(want)
	compiled, err := compile(t.Context(), "../../proto")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, file := range compiled {
		got = append(got, linesOf(file)...)
	}
	slices.Sort(got)
	for _, line := range want {
		if _, found := slices.BinarySearch(got, line); !found {
			t.Errorf("the .proto files lack %q", line)
		}
	}
	for _, line := range got {
		if _, found := slices.BinarySearch(want, line); !found {
			t.Errorf("the .proto files have %q, the wire has not", line)
		}
	}
}

// linesOf describes a file in the format of testdata/wire.txt.
func linesOf(file protoreflect.FileDescriptor) []string {
	lines := enumLines(file.Enums())
	for i := range file.Services().Len() {
		s := file.Services().Get(i)
		for j := range s.Methods().Len() {
			m := s.Methods().Get(j)
			stream := ""
			if m.IsStreamingServer() {
				stream = "stream "
			}
			lines = append(lines, fmt.Sprintf("%s/%s %s %s%s", s.FullName(), m.Name(), m.Input().FullName(), stream, m.Output().FullName()))
		}
	}
	for i := range file.Messages().Len() {
		m := file.Messages().Get(i)
		lines = append(append(lines, string(m.FullName())), enumLines(m.Enums())...)
		for j := range m.Fields().Len() {
			f := m.Fields().Get(j)
			lines = append(lines, fmt.Sprintf("%s %d %s", f.FullName(), f.Number(), fieldType(f)))
		}
	}
	return lines
}

func enumLines(enums protoreflect.EnumDescriptors) []string {
	var lines []string
	for i := range enums.Len() {
		e := enums.Get(i)
		for j := range e.Values().Len() {
			v := e.Values().Get(j)
			lines = append(lines, fmt.Sprintf("%s=%s %d", e.FullName(), v.Name(), v.Number()))
		}
	}
	return lines
}

func fieldType(f protoreflect.FieldDescriptor) string {
	if f.IsMap() {
		return fmt.Sprintf("map<%s,%s>", fieldType(f.MapKey()), fieldType(f.MapValue()))
	}
	name := f.Kind().String()
	var named protoreflect.Descriptor
	switch f.Kind() {
	case protoreflect.MessageKind:
		named = f.Message()
	case protoreflect.EnumKind:
		named = f.Enum()
	}
	if named != nil {
		name = string(named.FullName())
	}
	if f.IsList() {
		return "[" + name + "]"
	}
	return name
}
