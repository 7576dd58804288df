package cli

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"helios/internal/errs"
	"helios/internal/options"
	"helios/internal/units"
)

// Option is one setting of a verb: its flag, which is the key in a YAML file too, and the field of
// T that it sets. The default of a flag is its Value; a flag without one leaves the field alone,
// whose zero value then says what a run without the flag does. So it is for plan.Config, whose
// defaults are the library's (WithDefaults): a run without flags is the library's run of a zero
// Config.
type Option[T any] struct {
	cli.Flag
	parse func(c *T, text string) error
	field func(c *T) any // pointer to the field; nil where the option sets several
	// preset is the text of the flag's Value; "" where it has none.
	preset string
	was    []string // former names
	use    func(text string) Use
}

// Use says what the text of an option can do.
type Use = options.Use

// Uses of options.
const (
	Unknown = options.Unknown
	Setting = options.Setting
	Input   = options.Input
	Aside   = options.Aside
)

// UseOf returns what a text of the option can do.
func (o Option[T]) UseOf(text string) Use {
	if o.use == nil {
		return Unknown
	}
	return o.use(text)
}

// Uses says what the option's text can do.
func (o Option[T]) Uses(use func(text string) Use) Option[T] {
	o.use = use
	return o
}

// Setting says that the option's text is a setting; with words, that those and lists of them are.
// A shell offers words.
func (o Option[T]) Setting(words ...string) Option[T] {
	if len(words) == 0 {
		return o.Uses(always(Setting))
	}
	return o.Uses(orWords(Unknown, words)).Offers(words...)
}

// Input says that the option names a file or folder that is read; words are settings instead, and a
// shell offers them.
func (o Option[T]) Input(words ...string) Option[T] {
	if len(words) != 0 {
		o = o.Offers(words...)
	}
	return o.Uses(orWords(Input, words))
}

// Aside says that no result depends on the option; words are settings all the same.
func (o Option[T]) Aside(words ...string) Option[T] { return o.Uses(orWords(Aside, words)) }

func always(use Use) func(string) Use { return func(string) Use { return use } }

// orWords is Setting for words, each perhaps with a number as in presample:2, and lists of them.
func orWords(other Use, words []string) func(string) Use {
	return func(text string) Use {
		for part := range strings.SplitSeq(text, ",") {
			word, n, numbered := strings.Cut(part, ":")
			_, err := strconv.ParseUint(n, 10, 16)
			if !slices.Contains(words, word) || numbered && err != nil {
				return other
			}
		}
		return Setting
	}
}

// useOf is the use of an option by the type of its field: numbers, sizes and what else has a form
// of its own are settings; texts and switches have to say what they are.
func useOf(field any) func(string) Use {
	switch field.(type) {
	case *string, *[]string, *bool:
		return nil
	}
	return always(Setting)
}

// Key is the option's name.
func (o Option[T]) Key() string { return o.Names()[0] }

// Options are the settings of a verb, or a group of them.
type Options[T any] []Option[T]

// In returns options of a part of T, as options of T.
func In[T, Part any](at func(*T) *Part, part Options[Part]) Options[T] {
	out := make(Options[T], len(part))
	for i, x := range part {
		out[i] = Option[T]{Flag: x.Flag, preset: x.preset, was: x.was, use: x.use,
			parse: func(c *T, text string) error { return x.parse(at(c), text) }}
		if x.field != nil {
			out[i].field = func(c *T) any { return x.field(at(c)) }
		}
	}
	return out
}

// Group puts options under a heading of help.
func (o Options[T]) Group(name string) Options[T] {
	for _, x := range o {
		setCategory(x.Flag, name)
	}
	return o
}

// Shown says what a run without some options takes, where the verb has defaults of its own.
func (o Options[T]) Shown(text string, names ...string) Options[T] {
	for _, x := range o {
		if slices.Contains(names, x.Key()) {
			x.Default(text)
		}
	}
	return o
}

// Says gives an option another help text, where it means something else in a verb.
func (o Options[T]) Says(name, usage string) Options[T] {
	for _, x := range o {
		if f, is := x.Flag.(*cli.StringFlag); is && x.Key() == name {
			f.Usage = usage
		}
	}
	return o
}

// Flags returns the flags of the options, and their former names.
func (o Options[T]) Flags() []cli.Flag {
	flags := make([]cli.Flag, 0, len(o))
	for _, x := range o {
		flags = append(flags, x.Flag)
		for _, name := range x.was {
			flags = append(flags, &Renamed{
				StringFlag: cli.StringFlag{Name: name, Hidden: true}, To: x.Key()})
		}
	}
	return flags
}

// Renamed is a former name of the flag To, which no help lists.
type Renamed struct {
	cli.StringFlag
	To string
}

// Read sets the fields of those options that were given or that have a Value, and leaves the
// others alone.
func (o Options[T]) Read(c *cli.Context, to *T) error {
	for _, x := range o {
		if x.preset == "" && !c.IsSet(x.Key()) {
			continue
		}
		if err := x.parse(to, fmt.Sprint(c.Value(x.Key()))); err != nil {
			return err
		}
	}
	return nil
}

// Uses returns what texts of the options can do, by name.
func (o Options[T]) Uses() map[string]func(text string) Use {
	all := map[string]func(string) Use{}
	for _, x := range o {
		all[x.Key()] = x.UseOf
	}
	return all
}

// Set sets the field of an option from its text; the option is one of o.
func (o Options[T]) Set(to *T, key, text string) error {
	i := slices.IndexFunc(o, func(x Option[T]) bool { return x.Key() == key })
	return o[i].parse(to, text)
}

// Values are the settings of a *T by their names, for JSON: texts, numbers and lists of them.
// Options that set several fields are not among them.
func (o Options[T]) Values(of *T) map[string]any {
	out := map[string]any{}
	for _, x := range o {
		if x.field == nil {
			continue
		}
		v := reflect.ValueOf(x.field(of)).Elem()
		if s, is := v.Interface().(fmt.Stringer); is {
			out[x.Key()] = s.String()
			continue
		}
		switch v.Kind() {
		case reflect.Bool, reflect.String, reflect.Int, reflect.Int64, reflect.Uint64,
			reflect.Float64:
			out[x.Key()] = v.Interface()
		case reflect.Slice:
			texts := make([]string, v.Len())
			for i := range texts {
				texts[i] = fmt.Sprint(v.Index(i).Interface())
			}
			out[x.Key()] = texts
		default:
			out[x.Key()] = fmt.Sprintf("%+v", v.Interface())
		}
	}
	return out
}

// Given returns the name of the first of some fields of a *T whose option was given, or "".
func (o Options[T]) Given(c *cli.Context, to *T, fields ...any) string {
	for _, f := range fields {
		known := false
		for _, x := range o {
			if x.field == nil || x.field(to) != f {
				continue
			}
			if known = true; c.IsSet(x.Key()) {
				return x.Key()
			}
		}
		if !known {
			panic(fmt.Sprintf("cli: no option of %T sets the field %T", to, f))
		}
	}
	return ""
}

func setCategory(f cli.Flag, group string) {
	switch f := f.(type) {
	case *cli.StringFlag:
		f.Category = group
	case *cli.IntFlag:
		f.Category = group
	case *cli.Float64Flag:
		f.Category = group
	case *cli.Int64Flag:
		f.Category = group
	case *cli.Uint64Flag:
		f.Category = group
	case *cli.BoolFlag:
		f.Category = group
	case *cli.DurationFlag:
		f.Category = group
	}
}

// option makes an option of a field whose text parse reads. preset is the flag's Value.
func option[T any, F comparable](f cli.Flag, preset F, at func(*T) *F,
	parse func(text string) (F, error)) Option[T] {
	o := Option[T]{Flag: f, use: useOf(new(F)), field: func(c *T) any { return at(c) },
		parse: func(c *T, text string) (err error) {
			*at(c), err = parse(text)
			return err
		}}
	if preset != *new(F) {
		o.preset = fmt.Sprint(preset)
	}
	return o
}

// Text is an option that sets a field to its text.
func Text[T any](f *cli.StringFlag, at func(*T) *string) Option[T] {
	return option(f, f.Value, at, func(s string) (string, error) { return s, nil })
}

// Parsed is an option whose text sets a field by a rule of its own.
func Parsed[T, F any](f *cli.StringFlag, at func(*T) *F, parse func(text string) (F, error),
) Option[T] {
	return Option[T]{Flag: f, preset: f.Value, use: useOf(new(F)),
		field: func(c *T) any { return at(c) },
		parse: func(c *T, text string) (err error) {
			*at(c), err = parse(text)
			return err
		}}
}

// Int is an option with a whole number.
func Int[T any](f *cli.IntFlag, at func(*T) *int) Option[T] {
	return option(f, f.Value, at, strconv.Atoi)
}

// Int64 is an option with a whole number of things that may be billions.
func Int64[T any](f *cli.Int64Flag, at func(*T) *int64) Option[T] {
	return option(f, f.Value, at,
		func(s string) (int64, error) { return strconv.ParseInt(s, 10, 64) })
}

// Uint64 is an option with a whole number that is not negative, such as a seed.
func Uint64[T any](f *cli.Uint64Flag, at func(*T) *uint64) Option[T] {
	return option(f, f.Value, at,
		func(s string) (uint64, error) { return strconv.ParseUint(s, 10, 64) })
}

// Float is an option with a number.
func Float[T any](f *cli.Float64Flag, at func(*T) *float64) Option[T] {
	return option(f, f.Value, at,
		func(s string) (float64, error) { return strconv.ParseFloat(s, 64) })
}

// Bool is an option that is on or off.
func Bool[T any](f *cli.BoolFlag, at func(*T) *bool) Option[T] {
	return option(f, f.Value, at, strconv.ParseBool)
}

// Switch is an option that sets a field to on or off, and without it leaves what is neither.
func Switch[T, F any](f *cli.BoolFlag, at func(*T) *F, on, off F) Option[T] {
	return Option[T]{Flag: f, field: func(c *T) any { return at(c) },
		parse: func(c *T, text string) error {
			is, err := strconv.ParseBool(text)
			*at(c) = off
			if is {
				*at(c) = on
			}
			return err
		}}
}

// Duration is an option with a time.
func Duration[T any](f *cli.DurationFlag, at func(*T) *time.Duration) Option[T] {
	return option(f, f.Value, at, time.ParseDuration)
}

// List is an option with texts between commas; an empty part is refused.
func List[T any](f *cli.StringFlag, at func(*T) *[]string) Option[T] {
	return Parsed(f, at, func(s string) ([]string, error) { return SplitList(f.Name, s) })
}

// SplitList splits a flag's text such as a,b.
func SplitList(flag, text string) ([]string, error) {
	if text == "" {
		return nil, nil
	}
	parts := strings.Split(text, ",")
	for i, p := range parts {
		if parts[i] = strings.TrimSpace(p); parts[i] == "" {
			return nil, errs.New(errs.Usage, "--%s %q has an empty part; write it like a,b",
				flag, text)
		}
	}
	return parts, nil
}

// Bytes is an option with a size, such as 64MiB.
func Bytes[T any](f *cli.StringFlag, at func(*T) *int64) Option[T] {
	return Parsed(f, at, func(s string) (int64, error) {
		n, err := units.ParseBytes(s)
		if err != nil {
			return 0, errs.New(errs.Usage, "--%s: %w", f.Name, err)
		}
		return n, nil
	})
}

// Budget is an option with a size or a share.
func Budget[T any](f *cli.StringFlag, at func(*T) *units.Budget) Option[T] {
	return Parsed(f, at, func(s string) (units.Budget, error) {
		b, err := units.ParseBudget(s)
		if err != nil {
			return b, errs.New(errs.Usage, "--%s: %w", f.Name, err)
		}
		return b, nil
	})
}

// Share is an option with a share of a whole, such as 5% or 0.05.
func Share[T any](f *cli.StringFlag, at func(*T) *float64) Option[T] {
	return Parsed(f, at, func(s string) (float64, error) {
		v, err := units.ParseShare(s)
		if err != nil {
			return 0, errs.New(errs.Usage, "--%s %w", f.Name, err)
		}
		return v, nil
	})
}

// Positive refuses a 0 that was typed where 0 stands for a default.
func (o Option[T]) Positive() Option[T] {
	key := o.Key()
	return o.Checked(func(_ *T, s string) error {
		v, err := strconv.ParseFloat(strings.TrimSuffix(s, "%"), 64)
		if err == nil && v == 0 {
			return errs.New(errs.Usage, "--%s 0 is not a positive number", key)
		}
		return nil
	})
}

// Checked adds a check, which sees the options read so far with this one set, and may change them.
func (o Option[T]) Checked(check func(c *T, text string) error) Option[T] {
	parse := o.parse
	o.parse = func(c *T, s string) error {
		if err := parse(c, s); err != nil {
			return err
		}
		return check(c, s)
	}
	return o
}

// Was gives an option the names that it had before. They hold for one version more.
func (o Option[T]) Was(names ...string) Option[T] {
	o.was = append(o.was, names...)
	return o
}

// Default says what a run without the option takes, where the field's default does not.
func (o Option[T]) Default(text string) Option[T] {
	switch f := o.Flag.(type) {
	case *cli.StringFlag:
		f.DefaultText = text
	case *cli.IntFlag:
		f.DefaultText = text
	}
	return o
}
