package vm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"strings"

	"github.com/directvol/directvol/tests/guest/remote"
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

// Run runs a program of the host in the guest, and returns its output. No program waits for udev,
// which the guest does not have.
func (g *Guest) Run(ctx context.Context, program string, arguments ...string) (string, error) {
	words, err := g.Program(ctx, program)
	if err != nil {
		return "", err
	}
	exit, err := g.Remote.Exec(ctx, remote.Command{Argv: append(words, arguments...), Env: []string{"DM_DISABLE_UDEV=1"}})
	if err == nil && exit.Code != 0 {
		err = fmt.Errorf("%s %s: exit status %d\n%s%s", program, strings.Join(arguments, " "), exit.Code, exit.Stdout, exit.Stderr)
	}
	return string(exit.Stdout), err
}
