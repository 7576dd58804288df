package cli

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/urfave/cli/v2"

	"helios/internal/options"
)

// Option is one setting of a verb: its flag, which is the key in a YAML file too, and the field of
// T that it sets, which declares it in its tags (package options). A flag that is not given leaves
// the field alone, which then has the default of its tag, or the zero value: so it is with
// plan.Config, whose defaults are the library's (WithDefaults). A run without flags is the
// library's run of a zero Config.
type Option[T any] struct {
	cli.Flag
	declared options.Option // of a T with defaults
}

// Use classifies the text of an option by its effects.
type Use = options.Use

// Uses of options.
const (
	Unknown = options.Unknown
	Setting = options.Setting
	Input   = options.Input
	Aside   = options.Aside
)

// Key is the option's name.
func (o Option[T]) Key() string { return o.declared.Name }

// Words returns the texts of an option that names a file which name none.
func (o Option[T]) Words() []string { return o.declared.Words() }

// UseOf returns what a text of the option can do.
func (o Option[T]) UseOf(text string) Use { return o.declared.UseOf(text) }

// Options are the settings of a verb.
type Options[T any] []Option[T]

// Of returns the options that T declares.
func Of[T any]() (out Options[T]) {
	ptr := new(T)
	options.Defaults(ptr)
	for _, o := range options.Of(ptr) {
		out = append(out, Option[T]{Flag: taggedFlag(o), declared: o})
	}
	return out
}

func (o Options[T]) filter(keep func(x Option[T]) bool) (out Options[T]) {
	for _, x := range o {
		if keep(x) {
			out = append(out, x)
		}
	}
	return out
}

// Only returns the options of some names.
func (o Options[T]) Only(names ...string) Options[T] {
	return o.filter(func(x Option[T]) bool { return slices.Contains(names, x.Key()) })
}

// Without returns the options but those of some names.
func (o Options[T]) Without(names ...string) Options[T] {
	return o.filter(func(x Option[T]) bool { return !slices.Contains(names, x.Key()) })
}

// WithoutGroups returns the options but those under some headings.
func (o Options[T]) WithoutGroups(groups ...string) Options[T] {
	return o.filter(func(x Option[T]) bool { return !slices.Contains(groups, x.declared.Group) })
}

// WithoutFrom returns the options but those under a heading, of which some stay.
func (o Options[T]) WithoutFrom(group string, but ...string) Options[T] {
	return o.filter(func(x Option[T]) bool {
		return x.declared.Group != group || slices.Contains(but, x.Key())
	})
}

// Says gives an option another help text, where it means something else in a verb.
func (o Options[T]) Says(name, usage string) Options[T] { return o.set("Usage", usage, name) }

// Shown describes the value that a run without some options takes, where the verb has defaults of
// its own.
func (o Options[T]) Shown(text string, names ...string) Options[T] {
	return o.set("DefaultText", text, names...)
}

// set sets a text of some flags.
func (o Options[T]) set(field, text string, names ...string) Options[T] {
	for _, x := range o {
		if slices.Contains(names, x.Key()) {
			reflect.ValueOf(x.Flag).Elem().FieldByName(field).SetString(text)
		}
	}
	return o
}

// Flags returns the flags of the options.
func (o Options[T]) Flags() []cli.Flag {
	flags := make([]cli.Flag, len(o))
	for i, x := range o {
		flags[i] = x.Flag
	}
	return flags
}

// Read sets the fields to their defaults, and those whose options were given.
func (o Options[T]) Read(c *cli.Context, to *T) error {
	options.Defaults(to)
	for _, f := range options.Of(to) {
		if o.has(f.Name) && c.IsSet(f.Name) {
			if err := f.Set(fmt.Sprint(c.Value(f.Name))); err != nil {
				return err
			}
		}
	}
	return nil
}

func (o Options[T]) has(name string) bool {
	return slices.ContainsFunc(o, func(x Option[T]) bool { return x.Key() == name })
}

// Common returns the names of the options that a short help has.
func (o Options[T]) Common() (names []string) {
	for _, x := range o {
		if x.declared.Common {
			names = append(names, x.Key())
		}
	}
	return names
}

// Uses returns what texts of the options can do, by name.
func (o Options[T]) Uses() map[string]func(text string) Use {
	all := map[string]func(string) Use{}
	for _, x := range o {
		all[x.Key()] = x.UseOf
	}
	return all
}

// Set sets the field of an option from its text; T declares it.
func (o Options[T]) Set(to *T, key, text string) error {
	f, ok := options.Find(to, key)
	if !ok {
		panic(fmt.Sprintf("cli: %T has no option %s", to, key))
	}
	return f.Set(text)
}

// Values are the settings of a *T by their names, for JSON: texts, numbers and lists of them.
func (o Options[T]) Values(of *T) map[string]any {
	out := map[string]any{}
	for _, f := range options.Of(of) {
		if o.has(f.Name) {
			out[f.Name] = f.Text()
		}
	}
	return out
}

// Given returns the name of the first of some fields of a *T whose option was given, or "".
func (o Options[T]) Given(c *cli.Context, to *T, fields ...any) string {
	names := map[any]string{}
	for _, f := range options.Of(to) {
		if o.has(f.Name) {
			names[f.Pointer()] = f.Name
		}
	}
	for _, f := range fields {
		name, known := names[f]
		if !known {
			panic(fmt.Sprintf("cli: no option of %T sets the field %T", to, f))
		}
		if c.IsSet(name) {
			return name
		}
	}
	return ""
}
