// Package program contains what all programs of this repository have in common: --help and
// --version, signals, errors on one line, and these exit statuses:
//
//	0    success
//	1    failure; the standard error says why
//	2    wrong command line; nothing was tried
//	130  interrupted by Ctrl-C or another signal, as a shell reports it; a program that serves until a
//	     signal comes, and says so, ends with 0
//	141  nothing reads the standard output any more, as a shell reports SIGPIPE
//
// A program may have further statuses of its own (WithStatus).
package program

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/version"
)

// The exit statuses.
const (
	OK          = 0
	Failed      = 1
	WrongUsage  = 2
	Interrupted = 130
	Unread      = 141
)

// ErrReported is the error of a command that has already reported its failure in its output.
var ErrReported = errors.New("it failed")

// usageError is the error of a wrong command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// Usage marks err as an error of the command line. The command must not have tried anything yet.
// Usage(nil) is nil.
func Usage(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

// Usagef is Usage for a new error.
func Usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// statusError is an error with its own exit status.
type statusError struct {
	error
	status int
}

func (e statusError) Unwrap() error { return e.error }

// WithStatus makes err end the program with the given exit status, which must differ from those
// above. It returns nil for a nil err.
func WithStatus(status int, err error) error {
	if err == nil {
		return nil
	}
	return statusError{err, status}
}

// Main runs a command as this process, and exits. SIGINT, SIGTERM and SIGHUP end the command's
// context, except those that nohup or a shell ignores; a second signal ends the process at once. A
// closed standard output does not end the process: writes to it fail.
func Main(root *cobra.Command) {
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)
	var ends []os.Signal
	for _, s := range []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP} {
		if !signal.Ignored(s) {
			ends = append(ends, s)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	context.AfterFunc(ctx, stop)
	os.Exit(Run(ctx, root, os.Args[1:], os.Stdout, os.Stderr))
}

// Run runs a command with arguments and returns its exit status. Errors are written to stderr on
// one line that begins with the program's name. A command's RunE must return a Usage error for a
// wrong command line; cobra's own errors count as such.
func Run(ctx context.Context, root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	tried := false
	prepare(root, &tried)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	command, err := root.ExecuteContextC(ctx)
	_, wrong := errors.AsType[usageError](err)
	switch {
	case err == nil:
		return OK
	case wrong || !tried && !isOutput(err):
		fmt.Fprintf(stderr, "%s: %s; see %s --help\n", root.Name(), oneLine(err), command.CommandPath())
		return WrongUsage
	case ctx.Err() != nil:
		fmt.Fprintf(stderr, "%s: %s\n", root.Name(), interruption(ctx, err))
		return Interrupted
	case IsUnread(err):
		return Unread
	case !errors.Is(err, ErrReported):
		fmt.Fprintf(stderr, "%s: %v\n", root.Name(), err)
	}
	if own, ok := errors.AsType[statusError](err); ok {
		return own.status
	}
	return Failed
}

// IsUnread reports whether err means that nothing reads the standard output any more. An EPIPE of a
// socket does not count.
func IsUnread(err error) bool { return isOutput(err) && errors.Is(err, unix.EPIPE) }

// isOutput reports whether err is the error of a write to the standard output.
func isOutput(err error) bool {
	write, ok := errors.AsType[*fs.PathError](err)
	return ok && write.Path == os.Stdout.Name()
}

// NoArgs refuses arguments, for commands that take only flags.
func NoArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return Usagef("unexpected argument %q", args[0])
	}
	return nil
}

// prepare sets the properties that all programs have in common. tried becomes true when the command
// itself begins.
func prepare(root *cobra.Command, tried *bool) {
	root.Version = version.String()
	root.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	root.SilenceErrors, root.SilenceUsage = true, true // Run prints the error
	if root.HasSubCommands() {
		root.Args = nil // makes cobra suggest a command for a misspelt one
		root.CompletionOptions.HiddenDefaultCmd = true
	} else {
		root.CompletionOptions.DisableDefaultCmd = true
	}
	if root.RunE == nil {
		root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	markTried(root, tried)
}

func markTried(cmd *cobra.Command, tried *bool) {
	if run := cmd.RunE; run != nil {
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			*tried = true
			return run(cmd, args)
		}
	}
	for _, sub := range cmd.Commands() {
		markTried(sub, tried)
	}
}

// oneLine joins the lines of an error, such as cobra's suggestions of another command.
func oneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\t' }), " ")
}

// interruption returns the message for an interrupted command, with what its error adds.
func interruption(ctx context.Context, err error) string {
	text := err.Error()
	switch {
	case errors.Is(err, ErrReported), text == ctx.Err().Error(), text == context.Cause(ctx).Error():
		return "interrupted"
	case strings.HasPrefix(text, "interrupted"):
		return text
	}
	return "interrupted: " + strings.TrimSuffix(text, ": "+context.Canceled.Error())
}
