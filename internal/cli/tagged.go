// Package cli has what the verbs of heliosctl share: flags of declared options, completion and the
// reading of values. cmd/heliosctl has the verbs.
package cli

import (
	"flag"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"helios/internal/options"
)

// FlagName is an option as a flag.
func FlagName(name string) string { return "--" + name }

// Lookup finds the flag of a name; nil where there is none.
func Lookup(flags []cli.Flag, name string) cli.Flag {
	for _, f := range flags {
		if slices.Contains(f.Names(), name) {
			return f
		}
	}
	return nil
}

// HasFlag reports whether one of flags has a name.
func HasFlag(flags []cli.Flag, name string) bool { return Lookup(flags, name) != nil }

// TaggedFlags returns the flags of a struct of options that says in its tags what they are
// (internal/options). The fields' values are the flags' defaults.
func TaggedFlags(ptr any) []cli.Flag {
	all := options.Of(ptr)
	flags := make([]cli.Flag, len(all))
	for i, o := range all {
		flags[i] = taggedFlag(o)
	}
	return flags
}

func taggedFlag(o options.Option) cli.Flag {
	usage := o.Usage(FlagName)
	if o.Arg != "" { // as urfave/cli marks it
		usage = strings.Replace(usage, o.Arg, "`"+o.Arg+"`", 1)
	}
	shown := options.Expand(o.ShownDefault(), FlagName)
	if o.IsSwitch() {
		on, _ := o.Value().(bool)
		return &cli.BoolFlag{Name: o.Name, Aliases: o.Aliases, Usage: usage, Value: on,
			DefaultText: shown, Category: o.Group}
	}
	if o.IsText() {
		_, list := o.Value().([]string)
		return &TextFlag{cli.StringFlag{Name: o.Name, Aliases: o.Aliases, Usage: usage,
			Value: o.Default, DefaultText: shown, Category: o.Group}, o.Offers, list, o.There}
	}
	switch v := o.Value().(type) {
	case int:
		return &cli.IntFlag{Name: o.Name, Aliases: o.Aliases, Usage: usage, Value: v,
			DefaultText: shown, Category: o.Group}
	case int64:
		return &cli.Int64Flag{Name: o.Name, Aliases: o.Aliases, Usage: usage, Value: v,
			DefaultText: shown, Category: o.Group}
	case uint64:
		return &cli.Uint64Flag{Name: o.Name, Aliases: o.Aliases, Usage: usage, Value: v,
			DefaultText: shown, Category: o.Group}
	case float64:
		return &cli.Float64Flag{Name: o.Name, Aliases: o.Aliases, Usage: usage, Value: v,
			DefaultText: shown, Category: o.Group}
	case time.Duration:
		return &cli.DurationFlag{Name: o.Name, Aliases: o.Aliases, Usage: usage, Value: v,
			DefaultText: shown, Category: o.Group}
	}
	panic(fmt.Sprintf("cli: option %s is of type %s, which has no flag", o.Name,
		reflect.TypeOf(o.Value())))
}

// Apply adds the flag to a set. A list of names that is given twice is refused, as its first half
// would be lost without a word.
func (f *TextFlag) Apply(set *flag.FlagSet) error {
	if err := f.StringFlag.Apply(set); err != nil || !f.list {
		return err
	}
	for _, name := range f.Names() {
		known := set.Lookup(name)
		known.Value = &once{Value: known.Value}
	}
	return nil
}

// once is a value that is set once.
type once struct {
	flag.Value
	is bool
}

// Set sets the value, and then refuses another.
func (o *once) Set(text string) error {
	if o.is && text != o.String() {
		return fmt.Errorf("the flag is given twice; give one list, \"%s,%s\"", o, text)
	}
	o.is = true
	return o.Value.Set(text)
}

// Get returns the value.
func (o *once) Get() any { return o.Value.(flag.Getter).Get() }

// ReadTagged sets the fields whose flags were given.
func ReadTagged(c *cli.Context, ptr any) error {
	for _, o := range options.Of(ptr) {
		if c.IsSet(o.Name) {
			if err := o.Set(fmt.Sprint(c.Value(o.Name))); err != nil {
				return err
			}
		}
	}
	return nil
}
