package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/infile"
	"helios/internal/outfile"
	"helios/sched/plan"
)

func rerunCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "rerun",
		Usage:     "run again what made a file of results, and hold the results against it",
		ArgsUsage: "RESULTS",
		Description: "RESULTS is a file that --results has written. The verb runs with the same settings, in the same folder, and writes\n" +
			"nothing but what flags of rerun name. It then compares all that has to be equal: parameters, losses, accuracies, hits\n" +
			"on the virtual clock, audits; times are not. A file may come from anybody: only settings that a result depends on are\n" +
			"taken from it, a dataset by its UUID, and other inputs where their checksums are those of the run. Libraries are never opened.",
	}, 1, hcli.Of[rerunArgs]().Shown("not kept", "results").Says("results",
		"keep the results of the new run in `FILE`"), runRerun)
}

// rerunArgs holds the options of rerun.
type rerunArgs struct {
	outputs
	folder  string   `option:"folder" shown:"the one it ran in" arg:"DIR" usage:"run in DIR"`
	dataset string   `option:"dataset" there:"dataset" shown:"that of the run, by its UUID" arg:"DIR" usage:"run on the dataset in DIR"`
	inputs  []string `option:"input" shown:"those of the run, by their checksums" arg:"FLAG=PATH[,…]" usage:"take FLAG=PATH[,…] for inputs that the run had by these flags, as degrees=FILE"`
	dry     bool     `option:"dry-run" usage:"only print the command"`
}

// named are the inputs that the user names, by option, from wherever the run is.
func (a *rerunArgs) named() (map[string]string, error) {
	named := map[string]string{}
	add := func(name, path string) (err error) {
		named[name], err = filepath.Abs(path)
		return err
	}
	if a.dataset != "" {
		if err := add("dataset", a.dataset); err != nil {
			return nil, err
		}
	}
	for _, in := range a.inputs {
		name, path, ok := strings.Cut(in, "=")
		if !ok || name == "" || path == "" || named[name] != "" {
			return nil, errs.New(errs.Usage, "{input} %s is not FLAG=PATH, once for each flag", in)
		}
		if err := add(name, path); err != nil {
			return nil, err
		}
	}
	return named, nil
}

// againLine is the command of rerun --dry-run.
type againLine struct {
	Folder    string   `json:"folder"`
	Arguments []string `json:"arguments"`
}

// rerunLine has the number of values that were compared.
type rerunLine struct {
	Verb   string `json:"verb"`
	Equal  int    `json:"equal"`
	Params string `json:"params_sha256"` // of the last result; empty where the verb has none
}

func runRerun(ctx context.Context, e *env, a *rerunArgs) (err error) {
	path := e.c.Args().First()
	if path == "" {
		return errs.New(errs.Usage,
			"no RESULTS; give a file that {results} of train, compare, bench or cache has written")
	}
	if err := e.oneProcess(); err != nil {
		return err
	}
	was, err := readMade(path)
	if err != nil {
		return err
	}
	c, again, err := a.command(e, path, &was)
	if err != nil {
		return err
	}
	if a.dry {
		again.tellLeft(e, path)
		e.ui.Printf("heliosctl %s", shellWords(again.args()))
		return e.ui.Event("result", againLine{was.begun.Folder, again.args()})
	}
	if v := programVersion(); v != was.begun.Version {
		e.ui.Note("%s was made by heliosctl %s, this is %s", path, was.begun.Version, v)
	}
	kept, err := a.create("results", a.results)
	if err != nil {
		return err
	}
	defer closing(&err, kept.Discard)
	now, err := a.runAgain(ctx, e, path, &was, again, usesOf(c), kept)
	if err != nil {
		return err
	}
	n, err := was.same(now)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if n == 0 {
		return errs.New(errs.Failed,
			"%s: the run has no result that has to be equal, so nothing was compared", path)
	}
	again.tellLeft(e, path)
	e.ui.Printf("%s: %s was made again; all %d values that have to be equal are", path,
		was.begun.Verb, n)
	return e.ui.Event("result", rerunLine{was.begun.Verb, n, now.params})
}

// command returns the verb of a run and the settings to run it with again.
func (a *rerunArgs) command(e *env, path string, was *madeRun) (c *cli.Command, again *againRun,
	err error) {
	begun := was.begun
	switch {
	case len(begun.Arguments) == 0:
		return nil, nil, errs.New(errs.Usage,
			"%s was written by a heliosctl that did not keep its arguments; run it by hand: %s", path,
			shellWords(begun.Command))
	case begun.Schema > resultsSchema:
		return nil, nil, errs.New(errs.Usage,
			"%s is by a later heliosctl (%s, schema %d; this one knows %d); take that one", path,
			begun.Version, begun.Schema, resultsSchema)
	}
	if c, err = e.canRerun(path, begun); err != nil {
		return nil, nil, err
	}
	named, err := a.named()
	if err != nil {
		return nil, nil, err
	}
	if again, err = begun.settingsOf(c, cmp.Or(a.folder, begun.Folder), named); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	if was.shards > 1 && !slices.ContainsFunc(again.flags, func(a string) bool {
		return strings.HasPrefix(a, "--shards=")
	}) { // several processes took as many by themselves, and this is one
		again.flags = append(again.flags, fmt.Sprintf("--shards=%d", was.shards))
	}
	return c, again, nil
}

// runAgain runs the verb with its outputs in a folder that goes, and returns its results; kept gets
// them, too.
func (a *rerunArgs) runAgain(ctx context.Context, e *env, path string, was *madeRun,
	again *againRun, uses optionUses, kept *outfile.File) (now madeRun, err error) {
	dir, err := os.MkdirTemp("", "heliosctl-rerun-*")
	if err != nil {
		return now, errs.New(errs.Usage, "a folder for the new run: %w", err)
	}
	defer closing(&err, func() error { return os.RemoveAll(dir) })
	if dir, err = filepath.Abs(dir); err != nil {
		return now, err
	}
	made := filepath.Join(dir, "results.jsonl")
	into := []string{"--results=" + made}
	into = append(into, again.ownFolders(uses, dir)...)
	if e.stateDir != "" {
		state, err := filepath.Abs(e.stateDir)
		if err != nil {
			return now, err
		}
		into = append(into, "--state="+state)
	}
	folder := cmp.Or(a.folder, was.begun.Folder)
	if err := e.runIn(ctx, folder, again.args(into...)); err != nil {
		return now, err
	}
	if now, err = readMade(made); err != nil || kept == nil {
		return now, err
	}
	text, err := os.ReadFile(made)
	if err == nil {
		_, err = kept.Write(text)
	}
	return now, kept.Commit(err)
}

// plainWord is a word that means itself to a shell.
var plainWord = regexp.MustCompile(`^[-\w@%+=:,./]+$`)

// shellWords writes arguments as a line for a POSIX shell.
func shellWords(args []string) string {
	words := make([]string, len(args))
	for i, a := range args {
		if words[i] = a; !plainWord.MatchString(a) {
			words[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
	}
	return strings.Join(words, " ")
}

// findVerb finds a verb by the words of its name; nil where there is none.
func findVerb(cmds []*cli.Command, words []string) (c *cli.Command) {
	for _, name := range words {
		if c = find(cmds, name); c == nil {
			return nil
		}
		cmds = c.Subcommands
	}
	return c
}

// canRerun returns the verb of a file, and refuses one that asks for something else than a run with
// results.
func (e *env) canRerun(path string, begun runLine) (*cli.Command, error) {
	end := slices.Index(begun.Arguments, "--")
	verb := strings.Fields(begun.Verb)
	if end < 0 || len(verb) == 0 || len(begun.Arguments) < len(verb) ||
		!slices.Equal(begun.Arguments[:len(verb)], verb) {
		return nil, errs.New(errs.Usage,
			"%s: its first line is not what {results} writes: the arguments are not those of its verb %q",
			path, begun.Verb)
	}
	c := findVerb(e.c.App.Commands, verb)
	if c == nil || c.Name == e.c.Command.Name || !hcli.HasFlag(c.Flags, "results") {
		return nil, errs.New(errs.Usage, "%s is by the verb %q, which has no results to compare", path,
			begun.Verb)
	}
	for _, a := range begun.Arguments[:end] {
		if how, is := strings.CutPrefix(a, "--reduce="); is && how != plan.ReduceTree {
			return nil, errs.New(errs.Usage,
				"%s was made with {reduce} %s, which is not exact to the bit: there is nothing that has to be equal",
				path, how)
		}
	}
	return c, nil
}

// runIn runs a verb in a folder. It says itself what went wrong with it.
func (e *env) runIn(ctx context.Context, folder string, args []string) (err error) {
	here, err := os.Getwd()
	if err != nil {
		return err
	}
	if err := os.Chdir(folder); err != nil {
		return errs.New(errs.Usage,
			"the folder that the run was in: %w; name the one that has its files now with {folder}", err)
	}
	defer closing(&err, func() error { return os.Chdir(here) })
	if code := run(ctx, args, io.Discard, e.stderr); code != 0 {
		return errs.With(errs.Class(code), errSaid)
	}
	return nil
}

// madeRun has the values of a file of results that have to be equal in each run.
type madeRun struct {
	begun  runLine
	values []madeValue
	params string // of the last result
	shards int    // of the last result; 0: it does not say
	whole  bool   // it came to its end
}

type madeValue struct{ what, is string }

// equalKeys are the keys whose values a run that is made again has, too.
var equalKeys = []string{"params_sha256", "loss", "losses", "train_acc", "val_acc", "test_acc",
	"best_epoch", "seeds", "optimum_hit_ratio", "audited", "accuracy",
	"best"}

// exactKeys depend on the memory that was free, and on what came first, except in a plan and on
// the virtual clock.
var exactKeys = []string{"hit_ratio", "gpu_hit_ratio", "rows_gpu", "rows_cpu", "rows_ssd",
	"bytes_ssd", "ssd_commands"}

// maxCompared bounds the values of a file.
const maxCompared = 1 << 17

// readMade reads a file of results.
func readMade(path string) (m madeRun, err error) {
	f, err := infile.Open(path)
	if err != nil {
		return m, fmt.Errorf("results: %w", err)
	}
	defer closing(&err, f.Close)
	bad := func(what string) error {
		return errs.New(errs.Usage,
			"%s %s; give a file that {results} of a run that came to its end has written", path, what)
	}
	r := outfile.NewReader(f)
	for n := 0; ; n++ {
		text, rerr := r.Next()
		if rerr != nil && rerr != io.EOF {
			return m, fmt.Errorf("results: %s, line %d: %w; give another file", path, n+1, rerr)
		}
		if len(text) == 0 {
			break
		}
		if len(m.values) > maxCompared {
			return m, bad(fmt.Sprintf("has more than %d values to compare", maxCompared))
		}
		if what := m.add(n, text); what != "" {
			return m, bad(what)
		}
	}
	if !m.whole {
		return m, bad("is of a run that did not come to its end")
	}
	return m, nil
}

// add takes line n, counted from 0, and returns why it cannot be one of results, or "".
func (m *madeRun) add(n int, text []byte) string {
	var event map[string]any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if d.Decode(&event) != nil {
		return "has a line that is no JSON object"
	}
	switch name, _ := event["event"].(string); {
	case n == 0 && name != "begin":
		return "does not begin as results do"
	case n == 0:
		if err := json.Unmarshal(text, &m.begun); err != nil {
			return "does not begin as results do"
		}
	case name == "resume": // its result has what came before, and its flags are those of it all
		*m = madeRun{}
		if err := json.Unmarshal(text, &m.begun); err != nil {
			return "has a line \"resume\" that is not one of results"
		}
	case name == "end":
		m.whole, _ = event["whole"].(bool)
	case name == "epoch": // the result has all epochs
	default:
		exact := m.begun.Verb == "plan" ||
			slices.Contains(m.begun.Arguments, "--clock=virtual")
		m.collect(name, exact, event)
	}
	return ""
}

// collect takes what has to be equal from an event, in an order of its own.
func (m *madeRun) collect(what string, exact bool, v any) {
	switch v := v.(type) {
	case map[string]any:
		keys := make([]string, 0, len(v))
		for k := range v {
			keys = append(keys, k)
		}
		slices.Sort(keys)
		for _, k := range keys {
			if slices.Contains(exactKeys, k) && exact ||
				slices.Contains(equalKeys, k) && !slices.Contains(exactKeys, k) {
				text, _ := json.Marshal(v[k])
				m.values = append(m.values, madeValue{what + "." + k, string(text)})
				if s, is := v[k].(string); is && k == "params_sha256" {
					m.params = s
				}
				continue
			}
			if n, is := v[k].(json.Number); is && what+"."+k == "result.shards" {
				shards, _ := n.Int64()
				m.shards = int(shards)
			}
			m.collect(what+"."+k, exact, v[k])
		}
	case []any:
		for i, x := range v {
			m.collect(fmt.Sprintf("%s[%d]", what, i), exact, x)
		}
	}
}

// same compares with what a second run made, and returns how many values there were.
func (m *madeRun) same(now madeRun) (n int, err error) {
	var all []error
	for i, v := range m.values {
		switch {
		case i >= len(now.values) || now.values[i].what != v.what:
			return i, errs.New(errs.Failed, "the new run has no %s", v.what)
		case now.values[i].is != v.is:
			all = append(all, errs.New(errs.Failed, "%s was %s and is %s", v.what, v.is,
				now.values[i].is))
		}
	}
	if len(now.values) > len(m.values) {
		all = append(all, errs.New(errs.Failed, "the new run has a %s that was not there",
			now.values[len(m.values)].what))
	}
	if len(all) > 3 {
		all = append(all[:3], errs.New(errs.Failed, "and %d others differ", len(all)-3))
	}
	return len(m.values), errors.Join(all...)
}
