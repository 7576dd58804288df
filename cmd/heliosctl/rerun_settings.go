package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/infile"
	"helios/sched/plan"
	"helios/sched/tiers"
)

// A file of results may come from anybody. A run is made again from the settings in it, by what the
// verb's options can do (hcli.Use): from what has no use, nothing is taken.

// againRun is a run that is made again.
type againRun struct {
	verb  []string
	flags []string // as --name=value
	rest  []string // arguments
	left  []string // flags that no result depends on, which it goes without
}

func (r *againRun) args(more ...string) []string {
	return slices.Concat(r.verb, r.flags, more, []string{"--"}, r.rest)
}

// ownFolders are flags that keep what a run makes beside its results in dir, and not in the
// dataset's folder, which a file that anybody wrote could fill.
func (r *againRun) ownFolders(uses optionUses, dir string) (flags []string) {
	has := func(flag string) bool { return slices.Contains(r.flags, flag) }
	if uses["hotness-dir"] != nil && !has("--hotness-dir="+plan.NoFolder) {
		flags = append(flags, "--hotness-dir="+plan.NoFolder)
	}
	if has("--clock="+plan.ClockVirtual) || has("--pages-on="+plan.PagesSSDs) {
		return flags // nothing is laid out, or load has done it
	}
	for _, name := range []string{"packed", "parted"} {
		modes := tiers.Catalog.With(name)
		if uses[name] != nil && (uses["modes"] != nil || slices.ContainsFunc(modes,
			func(mode string) bool { return has("--mode=" + mode) })) {
			flags = append(flags, "--"+name+"="+filepath.Join(dir, name))
		}
	}
	return flags
}

// tellLeft notes the flags of the file that the run went without.
func (r *againRun) tellLeft(e *env, path string) {
	if len(r.left) > 0 {
		e.ui.Note("%s: left out %s, on which no result depends", path, strings.Join(r.left, ", "))
	}
}

// argumentOption is the option that an argument of a verb stands for.
func (uses optionUses) argumentOption() string {
	for _, name := range []string{"dataset", "graph"} {
		if uses[name] != nil {
			return name
		}
	}
	return ""
}

// of returns what a flag can do, those that all verbs have among them.
func (uses optionUses) of(name, text string) hcli.Use {
	if use := uses[name]; use != nil {
		return use(text)
	}
	if use := commonOptions().Uses()[name]; use != nil {
		return use(text)
	}
	if name == "config" || name == wideFlag { // what config said stands beside it
		return hcli.Aside
	}
	return hcli.Unknown
}

// settingsOf returns the run of a file's first line. named are the inputs that the user names, by
// option; others have to be what they were.
func (l *runLine) settingsOf(c *cli.Command, folder string, named map[string]string) (*againRun,
	error) {
	r := &againRun{verb: strings.Fields(l.Verb)}
	uses := usesOf(c)
	flags, rest, help, err := parse(c, l.Verb, l.Arguments[len(r.verb):])
	if err != nil || help || len(rest) > 1 {
		return nil, errs.New(errs.Usage, "the arguments in it are none of %s: %w", l.Verb,
			errors.Join(err))
	}
	for name, path := range named {
		if uses.of(name, path) != hcli.Input {
			return nil, errs.New(errs.Usage, "%s has no input %s, which was named for it", l.Verb, name)
		}
		r.flags = append(r.flags, "--"+name+"="+path)
	}
	slices.Sort(r.flags)
	if argument := uses.argumentOption(); len(rest) > 0 && named[argument] == "" {
		r.rest = rest
		if uses.of(argument, rest[0]) == hcli.Input {
			if err := l.unchanged(folder, argument, rest[0]); err != nil {
				return nil, err
			}
		}
	}
	for _, f := range flags {
		if named[f.name] != "" {
			continue
		}
		switch uses.of(f.name, f.value) {
		case hcli.Setting:
		case hcli.Aside:
			r.left = append(r.left, "--"+f.name)
			continue
		case hcli.Input:
			if err := l.unchanged(folder, f.name, f.value); err != nil {
				return nil, err
			}
		default:
			return nil, errs.New(errs.Refused,
				"%v=%s is nothing to take from a file: it may name a file or run a program; run the command by hand, if you trust it: %s",
				errs.Key(f.name), f.value, strings.Join(l.Command, " "))
		}
		r.flags = append(r.flags, "--"+f.name+"="+f.value)
	}
	return r, nil
}

// unchanged refuses an input that is not the one that the run had. One that is gone the verb itself
// reports.
func (l *runLine) unchanged(folder, option, path string) error {
	is, err := inputSum(folder, path)
	what := "is not what it was, or was never noted"
	switch {
	case err != nil:
		return errs.Errorf("%v %s: %w", errs.Key(option), path, err)
	case is == "":
		return nil
	case strings.HasPrefix(is, "dataset "):
		if is == "dataset "+l.Dataset {
			return nil
		}
		what = "is another dataset, or which one it was is not noted"
	case is == l.Inputs[option]:
		return nil
	}
	again := "--input " + option + "=PATH"
	if option == "dataset" {
		again = "--dataset DIR"
	}
	return errs.New(errs.Refused, "%v %s, which the file names, %s; name it yourself with %s", errs.Key(option),
		path, what, again)
}

// inputSum is the checksum of an input, a file, the files of a folder, or a list of these: of a
// dataset its UUID. "" is for one that is not there.
func inputSum(folder, text string) (string, error) {
	absolute := func(path string) string {
		if filepath.IsAbs(path) {
			return path
		}
		return filepath.Join(folder, path)
	}
	paths := []string{text}
	if _, err := os.Lstat(absolute(text)); err != nil {
		paths = strings.Split(text, ",")
	}
	h, found := sha256.New(), false
	for _, p := range paths {
		st, err := os.Stat(absolute(p))
		if errors.Is(err, fs.ErrNotExist) || p == "" {
			continue
		}
		if err != nil {
			return "", err
		}
		found = true
		files := []string{absolute(p)}
		if st.IsDir() {
			if _, err := os.Lstat(filepath.Join(absolute(p), dataset.MetaName)); err == nil {
				d, err := dataset.Open(absolute(p))
				if err != nil {
					return "", err
				}
				return "dataset " + d.Meta.UUID, d.Close()
			}
			entries, err := os.ReadDir(absolute(p))
			if err != nil {
				return "", err
			}
			files = nil
			for _, e := range entries {
				files = append(files, filepath.Join(absolute(p), e.Name()))
			}
		}
		for _, f := range files {
			if err := addSum(h, f, st.IsDir()); err != nil {
				return "", err
			}
		}
	}
	if !found {
		return "", nil
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// addSum adds a file to a checksum, in a folder with its name and where it is a regular one.
func addSum(h io.Writer, path string, inFolder bool) (err error) {
	if inFolder {
		if st, err := os.Stat(path); err != nil || !st.Mode().IsRegular() {
			return err
		}
		if _, err := fmt.Fprintf(h, "%q ", filepath.Base(path)); err != nil {
			return err
		}
	}
	f, err := infile.Open(path)
	if err != nil {
		return err
	}
	defer closing(&err, f.Close)
	_, err = io.Copy(h, f)
	return err
}

// inputSums are the checksums of the verb's inputs, but for a dataset, which is known by its UUID.
// An input that cannot be read has none: the verb reports it.
func (e *env) inputSums() map[string]string {
	if e.inputs != nil || e.c == nil {
		return e.inputs
	}
	e.inputs = map[string]string{}
	add := func(name, text string) {
		if e.uses.of(name, text) != hcli.Input {
			return
		}
		if sum, err := inputSum("", text); err == nil && sum != "" &&
			!strings.HasPrefix(sum, "dataset ") {
			e.inputs[name] = sum
		}
	}
	for name := range e.uses {
		if e.c.IsSet(name) {
			add(name, fmt.Sprint(e.c.Value(name)))
		}
	}
	if e.c.NArg() > 0 {
		add(e.uses.argumentOption(), e.c.Args().First())
	}
	return e.inputs
}
