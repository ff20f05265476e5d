package vm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
)

// Program copies a program of the host, with its shared libraries, into the guest, and returns the
// first words of a command line for it. The files lie on a disk that stays in the guest, so a
// second call copies nothing.
func (g *Guest) Program(ctx context.Context, program string) ([]string, error) {
	needs, err := sharedLibraries(program)
	if err != nil {
		return nil, err
	}
	name := filepath.Base(program)
	dir := path.Join("/programs", name)
	_, err = g.Remote.Stat(ctx, path.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		err = g.bring(ctx, "program-"+name, dir, append(needs.files, file{name, program}))
	}
	if err != nil {
		return nil, fmt.Errorf("bring %s into the guest: %w", program, err)
	}
	// The loader is not where the program looks for it, so the command line names it (ld.so(8)).
	return []string{path.Join(dir, path.Base(needs.loader)), "--library-path", dir, path.Join(dir, name)}, nil
}
