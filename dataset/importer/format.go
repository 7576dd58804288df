package importer

import (
	"context"
	"fmt"
	"slices"

	"helios/internal/options"
)

// Format is a kind of input that can be imported. Each stands in a file of its own, with its
// options: a struct with tags (internal/options) that embeds Options, or Output where its input is
// not files of edges. The command line's verbs, help and completion come from the list of formats.
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

// Drafts reports whether options ask for a description of the input, which Run then returns, and no
// dataset.
func (f *Format) Drafts(options any) bool {
	o, is := options.(*TablesOptions)
	return is && o.Describe != ""
}

// Run imports with options that Options made. The result, where not nil, reports the findings,
// and can be written as JSON.
func (f *Format) Run(ctx context.Context, options any) (fmt.Stringer, error) {
	return f.run(ctx, options)
}

// formats lists all formats by their names.
var formats = []*Format{
	debianFormat,
	dglFormat,
	edgesFormat,
	graphboltFormat,
	igbFormat,
	igbhFormat,
	mag240mFormat,
	metisFormat,
	mtxFormat,
	npyFormat,
	ogbFormat,
	planetoidFormat,
	tablesFormat,
	triplesFormat,
	webgraphFormat,
}

// Formats returns all formats by their names.
func Formats() []*Format { return slices.Clone(formats) }

// withOutput is a pointer to a format's options.
type withOutput[O any] interface {
	*O
	output() *Output
}

// newFormat returns a format whose options are of type O.
func newFormat[O any, P withOutput[O]](f Format, run func(context.Context, O) error) *Format {
	return reportingFormat[O, P](f, func(ctx context.Context, o O) (fmt.Stringer, error) {
		return nil, run(ctx, o)
	})
}

// reportingFormat returns a format that reports its findings.
func reportingFormat[O any, P withOutput[O]](f Format,
	run func(context.Context, O) (fmt.Stringer, error)) *Format {
	f.options = func() any {
		o := new(O)
		options.Defaults(o)
		return o
	}
	f.run = func(ctx context.Context, o any) (fmt.Stringer, error) { return run(ctx, *o.(*O)) }
	f.output = func(o any) *Output { return P(o.(*O)).output() }
	options.Of(f.options()) // panics where a tag is wrong
	return &f
}
