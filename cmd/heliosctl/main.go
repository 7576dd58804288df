// Command heliosctl trains graph neural networks whose features live on NVMe SSDs: it binds
// SSDs, lays a dataset out on them, trains, evaluates and measures.
//
// Every verb is a file of this package. Results go to standard output, progress and the one
// line that says what failed to standard error; the exit code is the cause (internal/errs).
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/outfile"
	"helios/internal/ssdmodel"
	"helios/internal/state"
	"helios/internal/ui"
)

func main() {
	ctx, stop := interruptible()
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// errSignal is the cause of a context that a signal ended, errOutputClosed of one that ended because nobody reads
// standard output any more.
var (
	errSignal       = errors.New("interrupted")
	errOutputClosed = errors.New("the reader of standard output closed it")
)

// interruptible returns a context that the first SIGINT, SIGTERM or SIGHUP cancels, so that the verb
// saves what it has. The second one ends the process at once. Without SIGPIPE a closed pipe is an error of the write
// that meets it, which run takes for a stop as well.
func interruptible() (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	sig := make(chan os.Signal, 2)
	signal.Notify(sig, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup(1)
		signal.Notify(sig, syscall.SIGHUP)
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	go func() {
		for s := range sig {
			if ctx.Err() != nil {
				if s == syscall.SIGHUP {
					continue // a terminal that goes sends it twice, and systemd behind SIGTERM
				}
				os.Exit(int(errs.Interrupted))
			}
			cancel(errSignal)
		}
	}()
	return ctx, func() { signal.Stop(sig); close(sig) }
}

// run is the whole command without the process around it: it returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	app := newApp(stdout, stderr)
	argv, verb, err := arrange(app, args)
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	e := &env{ui: ui.New(stdout, stderr), machine: thisMachine(), ctx: ctx, verb: verb, args: args}
	e.ui.Closed = func() { stop(errOutputClosed) }
	if err == nil {
		err = enoughFiles(unix.Getrlimit)
	}
	if err == nil {
		app.Metadata = map[string]any{envKey: e}
		err = app.RunContext(ctx, append([]string{app.Name}, argv...))
	}
	if cerr := e.ui.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		return 0
	}
	if errors.Is(err, errScript) {
		return int(errs.ClassOf(err)) // it has said why
	}
	if errors.Is(err, syscall.EPIPE) && context.Cause(ctx) == errOutputClosed {
		err = errs.With(errs.Interrupted, errOutputClosed) // all but the output was done
	}
	class, text := e.classify(err)
	if e.ui.JSON {
		// The same for a program that reads standard output, so that what it has read so far
		// does not look whole.
		if jerr := e.ui.Event("error", map[string]any{"verb": verb, "error": text, "exit_code": int(class)}); jerr == nil {
			_ = e.ui.Close()
		}
	}
	name := app.Name
	if verb != "" {
		name += " " + verb
	}
	e.ui.Error(name, text)
	return int(class)
}

const envKey = "env"

// env is what a verb works with.
type env struct {
	c     *cli.Context
	ui    *ui.UI
	store *state.Store
	// The bound SSDs that a flag left out, and the flag.
	leftOut     []string
	leftOutFlag string
	// What the verb sees of the computer that it runs on.
	machine *machine
	// How the verb wants software controllers: playing another model than the one they were bound
	// with, and looking at their doorbells for a device that cannot call them.
	playModel     *ssdmodel.Model
	pollDoorbells bool

	ctx      context.Context // the verb's, whose cause says why it was stopped
	verb     string
	args     []string // as they were typed
	outs     *outfile.Set
	dataMeta dataset.Meta // of the dataset that the verb opened
}

// action wraps a verb: it reads the common flags and refuses arguments that the verb does not
// take.
func action(maxArgs int, f func(ctx context.Context, e *env) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		e := c.App.Metadata[envKey].(*env)
		e.c = c
		e.ui.JSON, e.ui.Quiet = c.Bool("json"), c.Bool("quiet")
		if c.NArg() > maxArgs {
			return errs.New(errs.Usage, "unexpected argument %q; see \"%s --help\"", c.Args().Get(maxArgs), c.Command.HelpName)
		}
		st, err := state.Open(c.String("state"))
		if err != nil {
			return err
		}
		e.store = st
		if c.String("fault") == faultList {
			return e.listFaults()
		}
		return f(c.Context, e)
	}
}

// whenStopped says what is to be done after a Ctrl-C that ended a verb which saves nothing.
func whenStopped(err error, next string) error {
	if err == nil || !errors.Is(err, context.Canceled) {
		return err
	}
	return fmt.Errorf("%w; %s", err, next)
}

// dataset is the dataset's folder, by flag or by argument.
func (e *env) dataset() (string, error) {
	flag, arg := e.c.String("dataset"), e.c.Args().First()
	switch {
	case flag != "" && arg != "" && flag != arg:
		return "", errs.New(errs.Usage, "two datasets, --dataset %s and %s; give one", flag, arg)
	case flag == "" && arg == "":
		return "", errs.New(errs.Usage, "no dataset; give its folder with --dataset DIR (\"heliosctl generate\" and \"heliosctl import\" make one)")
	case flag == "":
		return arg, nil
	}
	return flag, nil
}
