// Package program is what all programs here have in common towards those who start them: --help and --version, signals, errors of one line, and
// these exit statuses:
//
//	0    it did what it was asked
//	1    it failed, and the standard error says why
//	2    the command line is wrong, and nothing was tried
//	130  Ctrl-C or another signal ended it, as a shell reports it
//	141  nobody reads the standard output any more, as a shell reports SIGPIPE
//
// A program may have further statuses of its own, by WithStatus.
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

// ErrReported is the error of a command that has already said what failed, in its place in the output.
var ErrReported = errors.New("it failed")

// usageError is that of a wrong command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// Usage makes err, of a command that has tried nothing yet, an error of the command line. The nil error stays nil.
func Usage(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

// Usagef is Usage of a new error.
func Usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// statusError is the error of a command that has an exit status of its own.
type statusError struct {
	error
	status int
}

func (e statusError) Unwrap() error { return e.error }

// WithStatus makes err end the program with an exit status of its own, which is none of those above. The nil error stays nil.
func WithStatus(status int, err error) error {
	if err == nil {
		return nil
	}
	return statusError{err, status}
}

// Main runs a command as this process, and ends it. SIGINT, SIGTERM and SIGHUP end the command's context, those that nohup or a shell
// ignores excepted; a second one ends the process at once. A reader that goes away does not: writes to it fail.
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

// Run runs a command with arguments and returns its exit status. Errors go to stderr, on one line that begins with the program's name.
// A command's RunE returns Usage where the command line is wrong; cobra's own errors are of that kind.
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
	case wrong || !tried:
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

// IsUnread says of an error that nobody reads the standard output any more. The EPIPE of a socket is another matter.
func IsUnread(err error) bool {
	write, ok := errors.AsType[*fs.PathError](err)
	return ok && write.Path == os.Stdout.Name() && errors.Is(err, unix.EPIPE)
}

// NoArgs is for commands that take flags alone.
func NoArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return Usagef("unexpected argument %q", args[0])
	}
	return nil
}

// prepare sets what all programs have in common. tried becomes true when the command itself begins.
func prepare(root *cobra.Command, tried *bool) {
	root.Version = version.String()
	root.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	root.SilenceErrors, root.SilenceUsage = true, true // Run prints the error
	if root.HasSubCommands() {
		root.Args = nil // so that cobra suggests a command for one that is misspelt
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

// interruption says that a command was interrupted, and what its error adds to that.
func interruption(ctx context.Context, err error) string {
	text := err.Error()
	switch {
	case errors.Is(err, ErrReported), text == ctx.Err().Error(), text == context.Cause(ctx).Error():
		return "interrupted"
	case strings.HasPrefix(text, "interrupted"):
		return text
	}
	return "interrupted: " + text
}
