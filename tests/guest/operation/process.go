package operation

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/guest/remote"
)

// signal sends a signal to every process of a program. It ignores a process that has ended
// meanwhile.
func signal(_ context.Context, args remote.Signal) (remote.Processes, error) {
	var found remote.Processes
	err := eachProcess(args.Program, func(id int) error {
		err := unix.Kill(id, args.Signal)
		if err == nil {
			found.IDs = append(found.IDs, id)
		} else if err != unix.ESRCH {
			return fmt.Errorf("kill %d: %w", id, err)
		}
		return nil
	})
	if err == nil && len(found.IDs) == 0 {
		err = fmt.Errorf("signal %s: no process runs it", args.Program)
	}
	return found, err
}

// threads returns the states of a program's threads.
func threads(_ context.Context, args remote.Threads) (remote.ThreadStates, error) {
	var found remote.ThreadStates
	err := eachProcess(args.Program, func(id int) error {
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", id))
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				continue // the process has ended
			}
			// The format is "id (name) state …", where the name may contain any character
			// (proc(5)).
			if _, rest, ok := strings.Cut(string(text[strings.LastIndexByte(string(text), ')')+1:]), " "); ok && rest != "" {
				stack, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "stack"))
				found.States, found.Stacks = append(found.States, rest[:1]), append(found.Stacks, string(stack))
			}
			found.WakeUps += wakeUps(filepath.Dir(file))
		}
		return err
	})
	if err == nil && len(found.States) == 0 {
		err = fmt.Errorf("threads of %s: no process runs it", args.Program)
	}
	return found, err
}

// wakeUps returns a thread's voluntary context switches, by its directory below /proc; 0 if it has
// ended.
func wakeUps(thread string) (count uint64) {
	text, err := os.ReadFile(filepath.Join(thread, "status"))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
	line, _, _ := strings.Cut(rest, "\n")
	count, _ = strconv.ParseUint(strings.TrimSpace(line), 10, 64)
	return count
}

// eachProcess calls do with the id of every process of a program.
func eachProcess(path string, do func(id int) error) error {
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		return err
	}
	for _, link := range links {
		program, err := os.Readlink(link)
		if err != nil || program != path {
			continue // a kernel thread has no program
		}
		id, err := strconv.Atoi(filepath.Base(filepath.Dir(link)))
		if err != nil {
			return err
		}
		if err := do(id); err != nil {
			return err
		}
	}
	return nil
}

func clock(context.Context, struct{}) (remote.Clock, error) {
	return remote.Clock{UnixMilliseconds: time.Now().UnixMilli()}, nil
}
