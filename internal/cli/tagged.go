package cli

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/internal/options"
)

// TaggedFlags returns the flags of a struct of options that says in its tags what they are
// (internal/options). The fields' values are the flags' defaults.
func TaggedFlags(ptr any) []cli.Flag {
	all := options.Of(ptr)
	flags := make([]cli.Flag, len(all))
	for i, o := range all {
		flags[i] = taggedFlag(o, "")
	}
	for i, o := range all {
		usage := NameFlags(o.Usage, flags)
		if o.Arg != "" { // as urfave/cli marks it
			usage = strings.Replace(usage, o.Arg, "`"+o.Arg+"`", 1)
		}
		if len(o.Choices) > 0 {
			usage += ": " + strings.Join(o.Choices, ", ")
		}
		flags[i] = taggedFlag(o, usage)
	}
	return flags
}

func taggedFlag(o options.Option, usage string) cli.Flag {
	if o.IsText() {
		f := Offer(&cli.StringFlag{Name: o.Name, Aliases: o.Aliases, Usage: usage,
			DefaultText: o.Shown}, o.Choices...)
		f.Value, _ = o.Value().(string)
		return f
	}
	switch v := o.Value().(type) {
	case bool:
		return &cli.BoolFlag{Name: o.Name, Aliases: o.Aliases, Usage: usage, Value: v,
			DefaultText: o.Shown}
	case int:
		return &cli.IntFlag{Name: o.Name, Aliases: o.Aliases, Usage: usage, Value: v,
			DefaultText: o.Shown}
	case int64:
		return &cli.Int64Flag{Name: o.Name, Aliases: o.Aliases, Usage: usage, Value: v,
			DefaultText: o.Shown}
	case uint64:
		return &cli.Uint64Flag{Name: o.Name, Aliases: o.Aliases, Usage: usage, Value: v,
			DefaultText: o.Shown}
	case float64:
		return &cli.Float64Flag{Name: o.Name, Aliases: o.Aliases, Usage: usage, Value: v,
			DefaultText: o.Shown}
	}
	panic(fmt.Sprintf("cli: option %s is of type %s, which has no flag", o.Name,
		reflect.TypeOf(o.Value())))
}

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
