// Package errs classifies errors by cause, so that a verb can choose its exit code
// and the library never has to.
//
// A class is attached once, where the cause is known, and survives wrapping with %w.
package errs

import (
	"errors"
	"fmt"
)

// Class is the cause of a failure. Its value is the exit code of heliosctl.
type Class int

const (
	Failed      Class = 1   // anything without a more exact class
	Usage       Class = 2   // a flag, a value, a file name or the input's content is wrong
	Capability  Class = 3   // the machine lacks something that was asked for
	Refused     Class = 4   // refused for safety: data would be lost
	Device      Class = 5   // an SSD, a device or stored data failed
	Interrupted Class = 130 // the user stopped the work; state is saved
)

type classed struct {
	class Class
	err   error
	text  Text
}

func (e *classed) Error() string { return e.text.String() }
func (e *classed) Unwrap() error { return e.err }

// New makes an error of a class from a format, which may use %w and name options ({cpu-cache}, see
// Text).
func New(c Class, format string, args ...any) error {
	return &classed{c, fmt.Errorf(format, args...), Textf(format, args...)}
}

// Errorf adds words to an error, whose class stays; the format may use %w and name options.
func Errorf(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return New(ClassOf(err), format, args...)
}

// With attaches a class to err; nil stays nil.
func With(c Class, err error) error {
	if err == nil {
		return nil
	}
	return &classed{c, err, textOf(err)}
}

// ClassOf returns the outermost class of err, Failed when it has none, and 0 for nil.
func ClassOf(err error) Class {
	if err == nil {
		return 0
	}
	var c *classed
	if errors.As(err, &c) {
		return c.class
	}
	return Failed
}

// Closing ends what a function has opened; an error of f is returned through err unless there is
// one already. It is for defer.
func Closing(err *error, f func() error) {
	if cerr := f(); *err == nil {
		*err = cerr
	}
}

// Also joins two errors on one line, unlike errors.Join; either may be nil.
func Also(err, other error) error {
	switch {
	case err == nil:
		return other
	case other == nil:
		return err
	}
	return fmt.Errorf("%w; also %w", err, other)
}
