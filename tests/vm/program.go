package vm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
)

// Program brings a program of the host into the guest, with the shared libraries
// that it is linked to, and returns the words that a command line for it begins
// with. It lies on a disk that stays in the guest; a second time nothing is
// brought.
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
	// The loader does not lie where the program looks for it (ld.so(8)).
	return []string{path.Join(dir, path.Base(needs.loader)), "--library-path", dir, path.Join(dir, name)}, nil
}
