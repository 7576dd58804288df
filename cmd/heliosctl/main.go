// Command heliosctl trains graph neural networks whose features live on NVMe SSDs: it binds
// SSDs, lays a dataset out on them, trains, evaluates and measures.
//
// Every verb is a file of this package. Results go to standard output, progress and the one
// line of a failure to standard error; the exit code is the cause (internal/errs).
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"helios/dataset"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/outfile"
	"helios/internal/state"
	"helios/internal/ui"
)

func main() {
	hostcpu.AddWaiter()
	ctx, stop := interruptible()
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// errSignal is the cause of a context that a signal ended, errOutputClosed of one that ended
// because nobody reads standard output any more.
var (
	errSignal       = errors.New("interrupted")
	errOutputClosed = errors.New("the reader of standard output closed it")
)

// errSaid ends a verb where what it ran, a script or another verb, has said itself what is wrong.
var errSaid = errors.New("see above")

// interruptible returns a context that the first SIGINT, SIGTERM or SIGHUP cancels, so that the
// verb saves what it has. The second one ends the process at once. Without SIGPIPE a closed pipe is
// an error of the write that meets it, which run takes for a stop as well.
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
	few := enoughFiles(unix.Getrlimit)
	if few != nil {
		// The collector's timer takes two files of its own, and the runtime ends the process with
		// a trace where it cannot have them. Nothing is left to do but to report few.
		debug.SetGCPercent(-1)
	}
	app := newApp(stdout, stderr)
	if q, asks := hcli.AsksToComplete(args); asks { // and no verb runs, whatever was typed
		_ = hcli.Complete(app, q, thereNow) // a shell shows no error
		return 0
	}
	argv, verb, err := arrange(app, args)
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	e := &env{ui: ui.New(stdout, stderr), machine: thisMachine(), ctx: ctx, verb: verb, args: args,
		argv: argv, stderr: stderr}
	e.ui.JSON, e.ui.LogJSON = asksForJSON(args) // so that errors of the flags are in it, too
	e.ui.Closed = func() { stop(errOutputClosed) }
	if err == nil {
		err = few
	}
	if err == nil {
		if places, is := app.Metadata[placesKey].(map[string]string); is {
			e.places = places
		}
		app.Metadata = map[string]any{envKey: e}
		err = app.RunContext(ctx, append([]string{app.Name}, argv...))
	}
	if cerr := e.ui.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		return 0
	}
	if errors.Is(err, errSaid) {
		return int(errs.ClassOf(err)) // it has said why
	}
	if errors.Is(err, syscall.EPIPE) && context.Cause(ctx) == errOutputClosed {
		err = errs.With(errs.Interrupted, errOutputClosed) // all but the output was done
	}
	class, text := e.classify(err)
	if e.ui.JSON {
		// The same for a program that reads standard output, so that what it has read so far
		// does not look whole.
		if jerr := e.ui.Event("error", errorLine{verb, text, int(class)}); jerr == nil {
			_ = e.ui.Close()
		}
	}
	name := app.Name
	if verb != "" {
		name += " " + verb
	}
	e.ui.Error(name, text, int(class))
	return int(class)
}

// asksForJSON reports whether arguments, of which some may be wrong, ask for results and for a log
// in JSON.
func asksForJSON(args []string) (results, log bool) {
	for i, arg := range args {
		switch before := args[max(i-1, 0)]; {
		case arg == "--":
			return results, log
		case arg == "--json", arg == "--json=true":
			results = true
		case arg == "--log-format=json", arg == "json" && before == "--log-format":
			log = true
		}
	}
	return results, log
}

// errorLine has the error of a verb.
type errorLine struct {
	Verb     string `json:"verb"`
	Error    string `json:"error"`
	ExitCode int    `json:"exit_code"`
}

const envKey = "env"

// env holds what every verb works with: the streams, the state folder, the machine. The options
// of a verb fill a struct of its own (verb).
type env struct {
	c        *cli.Context
	ui       *ui.UI
	stateDir string
	store    *state.Store
	// given returns the name of the first of some fields of the verb's struct whose flag was given,
	// or "".
	given   func(fields ...any) string
	places  map[string]string // of the options that a configuration file gave: file and line
	leftOut []string          // bound SSDs that --ssds leaves out
	// The computer that the verb runs on.
	machine *machine

	ctx          context.Context // the verb's; its cause is that of a stop
	verb         string
	args         []string // as they were typed
	argv         []string // the same, with those of --config, as arrange puts them
	stderr       io.Writer
	dataMeta     dataset.Meta // of the dataset that the verb opened
	tookDevices  []string     // names of those that the verb opened
	tookSSDs     []state.SSD
	tookSettings func() map[string]any // of the verb, by its options
	uses         optionUses            // of the verb
	inputs       map[string]string     // checksums of its inputs, by option, once they were made
}

// verb completes a command that takes up to maxArgs arguments: its flags are those of options, and
// run gets the struct that they fill.
func verb[T any](c *cli.Command, maxArgs int, options hcli.Options[T],
	run func(ctx context.Context, e *env, o *T) error) *cli.Command {
	c.Flags = append(c.Flags, options.Flags()...)
	uses := options.Uses()
	doIt := action(maxArgs, func(ctx context.Context, e *env) error {
		e.uses = uses
		o := new(T)
		e.given = func(fields ...any) string { return options.Given(e.c, o, fields...) }
		e.tookSettings = func() map[string]any {
			with := *o
			if s, is := any(&with).(interface{ settle() }); is {
				s.settle()
			}
			return options.Values(&with)
		}
		if err := options.Read(e.c, o); err != nil {
			if errors.Is(err, errListFaults) {
				return listFaults(e)
			}
			return err
		}
		if w, is := any(o).(interface{ files() *outfile.Set }); is {
			e.protect(w.files())
		}
		return run(ctx, e, o)
	})
	c.Action = answering(uses, options.Common(), doIt)
	return c
}

// answering wraps the action of a verb so that it answers askVerb.
func answering(uses optionUses, common []string, run cli.ActionFunc) cli.ActionFunc {
	return func(c *cli.Context) error {
		if ask, is := c.App.Metadata[usesKey].(func(optionUses, []string)); is {
			ask(uses, common)
			return nil
		}
		return run(c)
	}
}

// optionUses has the uses of a verb's options by their texts, by name.
type optionUses map[string]func(text string) hcli.Use

// usesKey has a function that takes the uses of a verb; its command calls that and does not run.
const usesKey = "uses"

// usesOf returns what the options of a verb can do; nil where it has no options of its own.
func usesOf(c *cli.Command) optionUses {
	uses, _ := askVerb(c)
	return uses
}

// askVerb returns what the options of a verb can do, and the names of those of its short help.
func askVerb(c *cli.Command) (uses optionUses, common []string) {
	app := &cli.App{Metadata: map[string]any{usesKey: func(of optionUses, names []string) {
		uses, common = of, names
	}}}
	if c.Action == nil || c.Action(cli.NewContext(app, nil, nil)) != nil {
		return nil, nil
	}
	return uses, common
}

// note shows a library's note.
func (e *env) note(t errs.Text) { e.ui.Note("%s", t.Spell(e.flag)) }

// plainNote shows a note that names no option.
func (e *env) plainNote(s string) { e.ui.Note("%s", s) }

// spell returns an error's text for people.
func (e *env) spell(err error) string { return errs.Spell(err, e.flag) }

// keywordsVar makes errors name options as keywords, gpu_cache; the Python package sets it.
const keywordsVar = "HELIOS_KEYWORDS"

// flag spells an option as the user gave it, or would give it: as the flag of the verb, as the key
// in the configuration file, or as a keyword of Python. One that the verb lacks is the flag of a
// verb that has it, train before others: "train's --checkpoint".
func (e *env) flag(k errs.Key) string {
	name := string(k)
	if os.Getenv(keywordsVar) != "" {
		return k.Keyword()
	}
	if place := e.places[name]; place != "" {
		return name + " (" + place + ")"
	}
	if e.c == nil || hcli.HasFlag(e.c.Command.Flags, name) {
		return k.Flag()
	}
	var having []string
	for path, c := range verbs(e.c.App.Commands, "") {
		if hcli.HasFlag(c.Flags, name) {
			having = append(having, path)
		}
	}
	switch {
	case len(having) == 0:
		return k.String()
	case slices.Contains(having, "train"):
		return "train's " + k.Flag()
	}
	return having[0] + "'s " + k.Flag()
}

// verbs are the commands that can be run, with their full names, in the order of the help.
func verbs(list []*cli.Command, parent string) iter.Seq2[string, *cli.Command] {
	return func(yield func(string, *cli.Command) bool) {
		for _, c := range list {
			path := strings.TrimPrefix(parent+" "+c.Name, " ")
			if len(c.Subcommands) == 0 {
				if !yield(path, c) {
					return
				}
				continue
			}
			for path, c := range verbs(c.Subcommands, path) {
				if !yield(path, c) {
					return
				}
			}
		}
	}
}

// action wraps a verb: it reads the common flags and refuses arguments that the verb does not
// take.
func action(maxArgs int, f func(ctx context.Context, e *env) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		e := c.App.Metadata[envKey].(*env)
		e.c = c
		var common commonArgs
		if err := commonOptions().Read(c, &common); err != nil {
			return err
		}
		e.stateDir, e.ui.JSON, e.ui.Quiet = common.stateDir, common.json, common.quiet
		e.ui.LogJSON = common.log == "json"
		e.ui.Wide = c.Bool(wideFlag)
		if c.NArg() > maxArgs {
			return errs.New(errs.Usage, "unexpected argument %q; see \"%s --help\"",
				c.Args().Get(maxArgs), c.Command.HelpName)
		}
		st, err := state.Open(e.stateDir)
		if err != nil {
			return err
		}
		e.store = st
		return f(c.Context, e)
	}
}

// whenStopped adds the next step after a Ctrl-C to the error of a verb that saves nothing.
func whenStopped(err error, next string) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, errSignal) {
		return fmt.Errorf("%w; %s", err, next)
	}
	return err
}

// datasetArgs name the dataset of a verb, which may be an argument, too.
type datasetArgs struct {
	dataset string `option:"dataset" there:"dataset" use:"input" arg:"DIR" usage:"dataset DIR; may also be given as an argument"`
}

// named reports whether the verb was given a dataset.
func (a *datasetArgs) named(e *env) bool {
	return e.given(&a.dataset) != "" || e.c.NArg() > 0
}

// dir returns the dataset's folder.
func (a *datasetArgs) dir(e *env) (string, error) {
	flag, arg := a.dataset, e.c.Args().First()
	switch {
	case flag != "" && arg != "" && flag != arg:
		return "", errs.New(errs.Usage, "two datasets, {dataset} %s and %s; give one", flag, arg)
	case flag == "" && arg == "":
		return "", errs.New(errs.Usage,
			"no dataset; give its folder with {dataset} DIR (\"heliosctl generate\" and \"heliosctl import\" make one)")
	case flag == "":
		return arg, nil
	}
	return flag, nil
}
