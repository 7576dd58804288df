// Package options reads what a struct of options says about itself in the tags of its fields, so
// that one declaration is the field, its name, its help, its default and its check. A command line
// makes flags of them (internal/cli); a library hashes or prints them. Embedded structs count as if
// their fields stood in their place.
//
//	type Options struct {
//		Out    string `option:"out" arg:"DIR" usage:"DIR to create"`
//		Loops  string `option:"self-loops" usage:"edges from a node to itself" oneof:"keep,drop"`
//		Seed   uint64 `option:"seed" usage:"seed of the splits" default:"1"`
//		Memory int64  `option:"memory" arg:"SIZE" usage:"SIZE to take" size:"64MiB" shown:"half of all"`
//	}
//
// The tags: option is the name; usage the help, which names other options as errs.Key does; arg the
// word in it that stands for the value; also lists other names; default is set by Defaults;
// shown is what help says of the default where the value does not; oneof lists all values; positive
// refuses 0; size reads 2GiB and refuses less than the tag says; share reads 5% or 0.05. A field
// without the tag option is no option.
package options

import (
	"encoding"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"helios/internal/errs"
	"helios/internal/units"
)

// Option is one field of a struct of options.
type Option struct {
	Name    string
	Aliases []string
	Usage   string
	Arg     string // the word of Usage that stands for the value
	Shown   string // what help says of the default; empty: the value
	Choices []string

	tag   reflect.StructTag
	value reflect.Value
}

// Of returns the options of a struct, in the order of its fields. It panics where a tag or a type
// is wrong, which is a mistake of the program.
func Of(ptr any) []Option {
	v := reflect.ValueOf(ptr)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		panic(fmt.Sprintf("options: %T is no pointer to a struct", ptr))
	}
	return of(v.Elem(), nil)
}

func of(v reflect.Value, out []Option) []Option {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, ok := f.Tag.Lookup("option")
		switch {
		case f.Anonymous && f.Type.Kind() == reflect.Struct:
			out = of(v.Field(i), out)
			continue
		case !ok:
			continue
		}
		o := Option{Name: name, Usage: f.Tag.Get("usage"), Arg: f.Tag.Get("arg"),
			Shown: f.Tag.Get("shown"), Aliases: words(f.Tag.Get("also")),
			Choices: words(f.Tag.Get("oneof")), tag: f.Tag, value: v.Field(i)}
		again := slices.ContainsFunc(out, func(x Option) bool { return x.Name == name })
		if again || o.Usage == "" || !strings.Contains(o.Usage, o.Arg) {
			panic(fmt.Sprintf("options: %s.%s: no usage, no arg in it, or a second option %s",
				v.Type(), f.Name, name))
		}
		out = append(out, o)
	}
	return out
}

func words(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(list, ",")
}

// Defaults sets the fields of a struct of options to the defaults of their tags.
func Defaults(ptr any) {
	for _, o := range Of(ptr) {
		if text, ok := o.tag.Lookup("default"); ok {
			if err := o.Set(text); err != nil {
				panic(fmt.Sprintf("options: the default of %s: %v", o.Name, err))
			}
		}
	}
}

// Value returns the field's value.
func (o Option) Value() any { return o.value.Interface() }

// IsText reports whether the option is written as text that Set reads in a way of its own: a
// string, a list, a size, a share or a type with UnmarshalText.
func (o Option) IsText() bool {
	_, own := o.value.Addr().Interface().(encoding.TextUnmarshaler)
	_, size := o.tag.Lookup("size")
	_, share := o.tag.Lookup("share")
	k := o.value.Kind()
	return own || size || share || k == reflect.String || k == reflect.Slice
}

// Set sets the field from text. Its errors are of class usage and name the option (errs.Key).
func (o Option) Set(text string) error {
	if len(o.Choices) > 0 && !slices.Contains(o.Choices, text) {
		return errs.New(errs.Usage, "unknown %v %q; choose one of %s", errs.Key(o.Name), text,
			strings.Join(o.Choices, ", "))
	}
	if err := o.set(text); err != nil {
		return errs.New(errs.Usage, "%v %w", errs.Key(o.Name), err)
	}
	if o.tag.Get("positive") != "" && o.value.IsZero() {
		return errs.New(errs.Usage, "%v %s is not a positive number", errs.Key(o.Name), text)
	}
	return nil
}

func (o Option) set(text string) error {
	if u, ok := o.value.Addr().Interface().(encoding.TextUnmarshaler); ok {
		return u.UnmarshalText([]byte(text))
	}
	if least, ok := o.tag.Lookup("size"); ok {
		return o.setSize(text, least)
	}
	if _, ok := o.tag.Lookup("share"); ok {
		v, err := units.ParseShare(text)
		if err == nil {
			o.value.SetFloat(v)
		}
		return err
	}
	switch k := o.value.Kind(); k {
	case reflect.String:
		o.value.SetString(text)
	case reflect.Bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", text)
		}
		o.value.SetBool(b)
	case reflect.Int, reflect.Int64:
		n, err := strconv.ParseInt(text, 10, o.value.Type().Bits())
		if err != nil {
			return fmt.Errorf("%q is not a whole number in range", text)
		}
		o.value.SetInt(n)
	case reflect.Uint64:
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return fmt.Errorf("%q is not a whole number from 0", text)
		}
		o.value.SetUint(n)
	case reflect.Float64:
		x, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return fmt.Errorf("%q is not a number", text)
		}
		o.value.SetFloat(x)
	case reflect.Slice:
		list, err := List(text)
		if err != nil {
			return err
		}
		o.value.Set(reflect.ValueOf(list))
	default:
		panic(fmt.Sprintf("options: %s is of kind %s, which has no text", o.Name, k))
	}
	return nil
}

func (o Option) setSize(text, least string) error {
	n, err := units.ParseBytes(text)
	if err != nil {
		return err
	}
	if m, err := units.ParseBytes(least); err != nil || n < m {
		return fmt.Errorf("%s is too little; give at least %s", text, least)
	}
	o.value.SetInt(n)
	return nil
}

// List splits a,b; white space around the parts goes, and an empty part is refused. An empty text
// is no list.
func List(text string) ([]string, error) {
	if text == "" {
		return nil, nil
	}
	parts := strings.Split(text, ",")
	for i, p := range parts {
		if parts[i] = strings.TrimSpace(p); parts[i] == "" {
			return nil, fmt.Errorf("%q has an empty part; write it like a,b", text)
		}
	}
	return parts, nil
}
