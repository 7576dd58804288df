package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/options"
	"helios/internal/units"
)

// arrange puts the arguments in the order that urfave/cli can parse (it takes a flag after the
// first argument for an argument): verb, then flags as --name=value, then "--" and arguments.
// On the way it checks names and values, so that a mistake gets one line that names the flag
// and the way out, and adds what --config's file says. It also returns the verb's name.
func arrange(app *cli.App, args []string) (argv []string, verb string, err error) {
	if len(args) == 0 || len(args) == 1 && isHelp(args[0]) {
		return []string{"--help"}, "", nil
	}
	if args[0] == "--version" {
		args = append([]string{"version"}, args[1:]...)
	}
	if args[0] == "help" {
		args = append(slices.Clone(args[1:]), "--help")
	}
	path, rest, err := locateVerb(app.Commands, args)
	verb = strings.Join(names(path), " ")
	if err != nil {
		return nil, verb, err
	}
	if len(path) == 0 || len(path[len(path)-1].Subcommands) > 0 {
		return append(names(path), "--help"), verb, nil
	}
	c := path[len(path)-1]
	if c.SkipFlagParsing {
		return append(names(path), rest...), verb, nil
	}
	flags, positional, help, err := parse(c, verb, rest)
	if err != nil {
		return nil, verb, err
	}
	if help {
		if !slices.Contains(positional, allFlags) {
			shorten(c, verb)
		}
		return append(names(path), "--help"), verb, nil
	}
	if file, ok := flags.get("config"); ok {
		places := map[string]string{}
		flags, err = addConfig(c, verb, file, flags, len(positional) > 0, places)
		if err != nil {
			return nil, verb, err
		}
		app.Metadata = map[string]any{placesKey: places}
	}
	argv = names(path)
	for _, f := range flags {
		argv = append(argv, "--"+f.name+"="+f.value)
	}
	return append(append(argv, "--"), positional...), verb, nil
}

// locateVerb finds the verb: the first argument that is neither a flag nor a flag's value, and of
// a group the one after that ("import npy"). rest are the other arguments. The path ends before a
// verb where help is asked for instead.
func locateVerb(cmds []*cli.Command, args []string) (path []*cli.Command, rest []string,
	err error) {
	for {
		i, err := firstArgument(cmds, path, args)
		switch {
		case err != nil:
			return path, nil, err
		case i < 0 && slices.ContainsFunc(args, isHelp):
			return path, nil, nil
		case i < 0:
			return path, nil, errs.New(errs.Usage, "no verb; choose one of %s",
				strings.Join(names(cmds), ", "))
		}
		c := find(cmds, args[i])
		if c == nil {
			see := "see \"heliosctl --help\""
			if near := find(cmds, options.Nearest(args[i], names(cmds))); near != nil {
				see = fmt.Sprintf("did you mean %s%s?", near.Name, inBrackets(near.Category))
			}
			return path, nil, errs.New(errs.Usage, "unknown verb %q; %s", args[i], see)
		}
		path = append(path, c)
		args = slices.Concat(args[:i], args[i+1:])
		if len(c.Subcommands) == 0 {
			return path, args, nil
		}
		cmds = c.Subcommands
	}
}

// placesKey has the places of the options that a configuration file gave, by name.
const placesKey = "places"

// allFlags behind --help has it list all flags of a verb.
const allFlags = "all"

// shorten leaves to a verb with many flags those for its help that people use most, as their
// declarations say, and those of all verbs.
func shorten(c *cli.Command, verb string) {
	const many = 22
	if len(c.Flags) < many {
		return
	}
	_, common := askVerb(c)
	if len(common) == 0 {
		return
	}
	short := append(common, flagNames(append(commonFlags(), cli.HelpFlag))...)
	all := len(c.Flags)
	c.Flags = slices.DeleteFunc(c.Flags,
		func(f cli.Flag) bool { return !slices.Contains(short, f.Names()[0]) })
	about, _, _ := strings.Cut(c.Description, "Columns:\n")
	c.Description = strings.TrimSpace(fmt.Sprintf("%d flags more: heliosctl %s --help %s\n\n%s",
		all-len(c.Flags), verb, allFlags, about))
}

type flagValue struct{ name, value string }

type flagValues []flagValue

func (v flagValues) get(name string) (string, bool) {
	for _, f := range slices.Backward(v) {
		if f.name == name {
			return f.value, true
		}
	}
	return "", false
}

func isHelp(a string) bool { return a == "--help" || a == "-h" || a == "-help" }

func isFlag(a string) bool { return len(a) > 1 && a[0] == '-' && a != "--" }

func names(cmds []*cli.Command) []string {
	out := make([]string, len(cmds))
	for i, c := range cmds {
		out[i] = c.Name
	}
	return out
}

func find(cmds []*cli.Command, name string) *cli.Command {
	for _, c := range cmds {
		if c.HasName(name) {
			return c
		}
	}
	return nil
}

// firstArgument is the index of the first argument that is no flag or value of one, or -1.
// Which flags take a value depends on the verb, which is not known yet: a flag counts as any
// verb under cmds has it.
func firstArgument(cmds, path []*cli.Command, args []string) (int, error) {
	for i := 0; i < len(args); i++ {
		if !isFlag(args[i]) {
			if args[i] == "--" {
				return -1, nil
			}
			return i, nil
		}
		if isHelp(args[i]) || strings.Contains(args[i], "=") {
			continue
		}
		name := strings.TrimLeft(args[i], "-")
		f := hcli.Lookup(commonFlags(), name)
		for _, c := range hcli.Leaves(cmds) {
			if f == nil {
				f = hcli.Lookup(c.Flags, name)
			}
			if f == nil {
				f = switchOff(c.Flags, name)
			}
		}
		if f == nil {
			return 0, unknownFlag(name, "", hcli.Leaves(cmds)...)
		}
		if _, ok := f.(*cli.BoolFlag); !ok {
			i++ // its value
		}
	}
	return -1, nil
}

// switchOff finds the flag that --no-NAME turns off, where no flag has that name.
func switchOff(flags []cli.Flag, name string) cli.Flag {
	what, no := strings.CutPrefix(name, "no-")
	f, is := hcli.Lookup(flags, what).(*cli.BoolFlag)
	if !no || !is || hcli.Lookup(flags, name) != nil {
		return nil
	}
	return f
}

func flagNames(flags []cli.Flag) []string {
	var out []string
	for _, f := range flags {
		out = append(out, f.Names()...)
	}
	return out
}

func unknownFlag(name, verb string, cmds ...*cli.Command) error {
	var all []string
	for _, c := range cmds {
		all = append(all, flagNames(c.Flags)...)
	}
	see := errs.Textf("see %q", strings.Join(strings.Fields("heliosctl "+verb+" --help"), " "))
	if guess := options.Nearest(name, all); guess != "" {
		see = errs.Textf("did you mean %v%s?", errs.Key(guess), groupNote(guess, cmds))
	}
	return errs.New(errs.Usage, "unknown flag %v; %s", errs.Key(name), see)
}

// groupNote names the heading of help that a flag stands under.
func groupNote(name string, cmds []*cli.Command) string {
	for _, c := range cmds {
		if f, is := hcli.Lookup(c.Flags, name).(cli.CategorizableFlag); is && f.GetCategory() != "" {
			return inBrackets(f.GetCategory())
		}
	}
	return ""
}

func inBrackets(group string) string {
	if group == "" {
		return ""
	}
	return " (" + group + ")"
}

// parse splits the arguments of c, called verb, into flags and positional arguments.
func parse(c *cli.Command, verb string, args []string) (flags flagValues, positional []string,
	help bool, err error) {
	for i := 0; i < len(args); i++ {
		a := args[i]
		if a == "--" {
			return flags, append(positional, args[i+1:]...), help, nil
		}
		if !isFlag(a) {
			positional = append(positional, a)
			continue
		}
		if isHelp(a) {
			help = true
			continue
		}
		name, value, given := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(a, "-"), "-"), "=")
		f := hcli.Lookup(c.Flags, name)
		if on := switchOff(c.Flags, name); on != nil && !given {
			f, name, value, given = on, on.Names()[0], "false", true
		}
		if f == nil {
			return nil, nil, false, unknownFlag(name, verb, c)
		}
		if _, ok := f.(*cli.BoolFlag); ok {
			if !given {
				value = "true"
			}
		} else if !given {
			if i++; i == len(args) {
				return nil, nil, false, errs.New(errs.Usage,
					"flag %v needs a value; see \"heliosctl %s --help\"", errs.Key(name), verb)
			}
			value = args[i]
		}
		if value, err = plainValue(f, name, value); err != nil {
			return nil, nil, false, err
		}
		flags = append(flags, flagValue{f.Names()[0], value})
	}
	return flags, positional, help, nil
}

// plainValue is a value that checkValue lets pass: a count such as 1M is written out, which flags
// of whole numbers take in every verb.
func plainValue(f cli.Flag, name, value string) (string, error) {
	switch f.(type) {
	case *cli.IntFlag, *cli.Int64Flag, *cli.Uint64Flag:
		if n, err := units.ParseCount(value); err == nil {
			if big, err := strconv.ParseUint(value, 10, 64); err == nil {
				return strconv.FormatUint(big, 10), nil // a seed may be larger than any count
			}
			value = strconv.FormatInt(n, 10)
		}
	}
	return value, checkValue(f, name, value)
}

// checkValue refuses a value that is not of the flag's type.
func checkValue(f cli.Flag, name, value string) error {
	var err error
	want := ""
	switch f.(type) {
	case *cli.BoolFlag:
		_, err = strconv.ParseBool(value)
		want = "true or false"
	case *cli.IntFlag:
		_, err = strconv.ParseInt(value, 10, 64)
		want = "a whole number"
	case *cli.Int64Flag:
		_, err = strconv.ParseInt(value, 10, 64)
		want = "a whole number"
	case *cli.Uint64Flag:
		_, err = strconv.ParseUint(value, 10, 64)
		want = "a whole number of at least 0"
	case *cli.Float64Flag:
		_, err = strconv.ParseFloat(value, 64)
		want = "a number"
	case *cli.DurationFlag:
		_, err = time.ParseDuration(value)
		want = "a time such as 500ms or 5s"
	}
	if err != nil {
		return errs.New(errs.Usage, "%v %q is not %s", errs.Key(name), value, want)
	}
	return nil
}

// usageError is for what urfave/cli still finds by itself.
func usageError(err error) error {
	return errs.New(errs.Usage, "%s; see \"heliosctl --help\"", err)
}

// meant suggests the nearest name, or gives the other advice.
func meant(name string, all []string, other string) string {
	return options.Meant(name, all, other)
}

// list splits a flag such as a,b; empty parts are refused.
func list(flag, value string) ([]string, error) {
	parts, err := options.List(value)
	if err != nil {
		return nil, errs.New(errs.Usage, "%v %w", errs.Key(flag), err)
	}
	return parts, nil
}

// parseList reads a list of different values; example is what an empty one lacks.
func parseList[T comparable](flag, text, example string,
	parse func(string) (T, error)) ([]T, error) {
	parts, err := list(flag, text)
	if err != nil {
		return nil, err
	}
	if len(parts) == 0 {
		return nil, errs.New(errs.Usage, "%v is empty; give %s", errs.Key(flag), example)
	}
	var out []T
	for _, p := range parts {
		v, err := parse(p)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return out, nil
}
