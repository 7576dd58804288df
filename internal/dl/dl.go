// Package dl opens shared libraries at run time, without cgo.
package dl

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Bind has Go function variables, whose addresses are in fns, call the functions of a library that
// have those symbols. Where it lacks some, the error names them and none is bound.
func Bind(library uintptr, fns map[string]any) error {
	var missing []string
	address := map[string]uintptr{}
	for symbol := range fns {
		p, err := Symbol(library, symbol)
		if err != nil {
			missing = append(missing, symbol)
		}
		address[symbol] = p
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		return fmt.Errorf("lacks %s", strings.Join(missing, ", "))
	}
	for symbol, p := range address {
		Register(fns[symbol], p)
	}
	return nil
}

// First opens the first library of names, by open, that use takes, and closes the others. Where
// there is none the error says of each why.
func First(names []string, open func(name string) (uintptr, error),
	use func(library uintptr, name string) error) error {
	var failed []error
	for _, name := range names {
		h, err := open(name)
		if err == nil {
			if err = use(h, name); err == nil {
				return nil
			}
			err = errors.Join(err, Close(h))
		}
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}

// named puts the library's or symbol's name in front of the loader's words, which mostly have it
// and may be empty.
func named(name string, err error) error {
	if strings.Contains(err.Error(), name) {
		return err
	}
	return fmt.Errorf("%s: %w", name, err)
}
