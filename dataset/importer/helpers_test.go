package importer

import "context"

func (o *Options) base() *Options { return o }

// with is a format's import with options of its own set.
func with[O any, P interface {
	*O
	base() *Options
}](imp func(context.Context, O) error, set func(*O)) importFunc {
	return func(ctx context.Context, o Options) error {
		var all O
		*P(&all).base() = o
		if set != nil {
			set(&all)
		}
		return imp(ctx, all)
	}
}

// plain is a format's import without options of its own.
func plain[O any, P interface {
	*O
	base() *Options
}](imp func(context.Context, O) error) importFunc {
	return with[O, P](imp, nil)
}
