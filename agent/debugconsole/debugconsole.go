// Package debugconsole gives the host a shell in the guest if the host asks for one: a shell on a
// pseudo-terminal (pty(7)) for each connection, or one on the guest's console. The listener decides
// who may connect. A session ends with its connection: the terminal hangs up, and the kernel sends
// SIGHUP to the shell and to its foreground processes.
package debugconsole

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/guestinit"
)

const (
	// MaxSessions is how many connections a listener for Serve should admit at once.
	MaxSessions = 8

	// lastWords is how long the terminal is read after the shell has ended, if a process that the
	// shell left behind keeps the terminal open.
	lastWords = 500 * time.Millisecond

	// hangUpLimit is how long a shell may go on after its terminal has hung up.
	hangUpLimit = 5 * time.Second

	// restart is the pause before the console's shell is started again, because a shell that cannot
	// read ends at once.
	restart = time.Second
)

// Console starts shells.
type Console struct {
	// Log receives an entry for each session.
	Log *logrus.Entry
	// Shells are the programs to try, in order; empty means bash and sh.
	Shells []string
}

// environment is the environment of each shell.
var environment = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/", "TERM=linux"}

// Serve gives each connection that l accepts a shell, until l fails or is closed, or ctx ends; then
// all sessions end.
func (c *Console) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var sessions sync.WaitGroup
	defer sessions.Wait()
	defer cancel()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		sessions.Go(func() {
			defer conn.Close()
			log := c.Log.WithField("peer", conn.RemoteAddr())
			if err := c.session(ctx, conn, log); err != nil {
				log.Warnf("debug console: %v", err)
				fmt.Fprintf(conn, "directvol-agent: %v\r\n", err)
			}
		})
	}
}

// session returns when the shell has ended. It returns an error if no shell could be started.
func (c *Console) session(ctx context.Context, conn net.Conn, log *logrus.Entry) error {
	shell, err := c.shell()
	if err != nil {
		return err
	}
	terminal, end, err := openTerminal()
	if err != nil {
		return err
	}
	defer terminal.Close()
	process, ended, err := start(shell, end)
	end.Close()
	if err != nil {
		return err
	}
	log = log.WithFields(logrus.Fields{"shell": shell, "shell_pid": process.Pid})
	log.Info("debug console: session begins")
	heard, said := make(chan struct{}), make(chan struct{})
	go relay(terminal, conn, heard)
	go relay(conn, terminal, said)
	var status unix.WaitStatus
	select {
	case status = <-ended:
		awaitLastWords(ctx, terminal, conn, heard, said)
	case <-said:
		status = hangUp(terminal, process, ended)
	case <-heard:
		status = hangUp(terminal, process, ended)
	case <-ctx.Done():
		status = hangUp(terminal, process, ended)
	}
	log.WithField("status", told(status)).Info("debug console: session ends")
	return nil
}

// relay copies until either side ends.
func relay(to io.Writer, from io.Reader, over chan<- struct{}) {
	defer close(over)
	_, _ = io.Copy(to, from)
}

// awaitLastWords waits until the peer has received the remaining output of a shell that has ended.
func awaitLastWords(ctx context.Context, terminal *os.File, conn net.Conn, heard, said <-chan struct{}) {
	until := time.Now().Add(lastWords)
	if errors.Join(terminal.SetReadDeadline(until), conn.SetWriteDeadline(until)) != nil {
		return
	}
	select {
	case <-said:
	case <-heard:
	case <-ctx.Done():
	}
}

// hangUp ends the shell by hanging up its terminal, and kills it if that does not end it.
func hangUp(terminal *os.File, process *os.Process, ended <-chan unix.WaitStatus) unix.WaitStatus {
	terminal.Close()
	limit := time.NewTimer(hangUpLimit)
	defer limit.Stop()
	select {
	case status := <-ended:
		return status
	case <-limit.C:
	}
	_ = process.Kill() // fails if it has just ended
	return <-ended
}

// RunOn keeps a shell running on a terminal, such as /dev/console, until ctx ends or the shell
// cannot be started.
func (c *Console) RunOn(ctx context.Context, path string) error {
	for {
		shell, err := c.shell()
		if err != nil {
			return err
		}
		terminal, err := openEnd(path)
		if err != nil {
			return err
		}
		process, ended, err := start(shell, terminal)
		terminal.Close()
		if err != nil {
			return err
		}
		log := c.Log.WithFields(logrus.Fields{"shell": shell, "shell_pid": process.Pid, "terminal": path})
		log.Debug("debug console: session begins")
		select {
		case status := <-ended:
			log.WithField("status", told(status)).Debug("debug console: session ends")
		case <-ctx.Done():
			_ = process.Signal(unix.SIGHUP)
			return ctx.Err()
		}
		pause := time.NewTimer(restart)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return ctx.Err()
		}
	}
}

// shell returns the first shell that exists in this guest.
func (c *Console) shell() (string, error) {
	shells := c.Shells
	if len(shells) == 0 {
		shells = []string{"/bin/bash", "/bin/sh"}
	}
	for _, shell := range shells {
		if info, err := os.Stat(shell); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return shell, nil
		}
	}
	return "", errors.New("no shell in this guest: put /bin/sh into the image")
}

// start starts a shell with terminal as its controlling terminal.
func start(shell string, terminal *os.File) (*os.Process, <-chan unix.WaitStatus, error) {
	process, ended, err := guestinit.Start(shell, []string{filepath.Base(shell)}, &os.ProcAttr{
		Dir: "/", Env: environment, Files: []*os.File{terminal, terminal, terminal},
		Sys: &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0},
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w (its loader or a library may be missing in the image)", err)
	}
	return process, ended, err
}

// told describes how a shell ended.
func told(status unix.WaitStatus) string {
	if status.Signaled() {
		return unix.SignalName(status.Signal())
	}
	return fmt.Sprintf("exit %d", status.ExitStatus())
}
