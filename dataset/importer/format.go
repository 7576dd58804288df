package importer

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"helios/internal/errs"
	"helios/internal/options"
)

// Format is a kind of input that can be imported. The file of a format registers it, with options
// of its own: a struct with tags (internal/options) that embeds Options, or Output where its input
// is not files of edges. The command line's verbs, help and completion come from this registry.
type Format struct {
	Name        string
	Usage       string // one line: what is imported
	Description string // what the input must hold, for help

	options func() any
	run     func(ctx context.Context, options any) (fmt.Stringer, error)
	output  func(options any) *Output
}

// Options returns a pointer to a new struct of the format's options, with their defaults.
func (f *Format) Options() any { return f.options() }

// Output returns the part of a format's options that all formats have.
func (f *Format) Output(options any) *Output { return f.output(options) }

// Run imports with options that Options made. What it returns, where not nil, says what was found,
// and can be written as JSON.
func (f *Format) Run(ctx context.Context, options any) (fmt.Stringer, error) {
	return f.run(ctx, options)
}

var formats []*Format

// Formats returns all formats by their names.
func Formats() []*Format { return slices.Clone(formats) }

// FormatOf returns a format.
func FormatOf(name string) (*Format, error) {
	var names []string
	for _, f := range formats {
		if f.Name == name {
			return f, nil
		}
		names = append(names, f.Name)
	}
	return nil, errs.New(errs.Usage, "unknown import format %q; choose one of %s", name,
		strings.Join(names, ", "))
}

// withOutput is a pointer to a format's options.
type withOutput[O any] interface {
	*O
	output() *Output
}

// register adds a format whose options are of type O.
func register[O any, P withOutput[O]](f Format, run func(context.Context, O) error) {
	registerReporting[O, P](f, func(ctx context.Context, o O) (fmt.Stringer, error) {
		return nil, run(ctx, o)
	})
}

// registerReporting adds a format that tells what it found.
func registerReporting[O any, P withOutput[O]](f Format,
	run func(context.Context, O) (fmt.Stringer, error)) {
	f.options = func() any {
		o := new(O)
		options.Defaults(o)
		return o
	}
	f.run = func(ctx context.Context, o any) (fmt.Stringer, error) { return run(ctx, *o.(*O)) }
	f.output = func(o any) *Output { return P(o.(*O)).output() }
	options.Of(f.options()) // panics at once where a tag is wrong
	at, found := slices.BinarySearchFunc(formats, f.Name,
		func(f *Format, name string) int { return strings.Compare(f.Name, name) })
	if found {
		panic("importer: two formats are called " + f.Name)
	}
	formats = slices.Insert(formats, at, &f)
}
