package ops

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/guest/act"
)

// signal sends a signal to every process of a program. One that has ended meanwhile has no need of it.
func signal(_ context.Context, args act.Signal) (act.Processes, error) {
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		return act.Processes{}, err
	}
	var found act.Processes
	for _, link := range links {
		program, err := os.Readlink(link)
		if err != nil || program != args.Program {
			continue // a thread of the kernel has none
		}
		id, err := strconv.Atoi(filepath.Base(filepath.Dir(link)))
		if err != nil {
			return act.Processes{}, err
		}
		if err := unix.Kill(id, args.Signal); err == nil {
			found.IDs = append(found.IDs, id)
		} else if err != unix.ESRCH {
			return found, &os.PathError{Op: "kill", Path: link, Err: err}
		}
	}
	if len(found.IDs) == 0 {
		return found, fmt.Errorf("signal %s: no process runs it", args.Program)
	}
	return found, nil
}
