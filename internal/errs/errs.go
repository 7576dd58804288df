// Package errs classifies errors by cause, so that a verb can choose its exit code
// and the library never has to.
//
// A class is attached once, where the cause is known, and survives wrapping with %w.
package errs

import (
	"errors"
	"fmt"
	"slices"
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
	keys  []Key // the options that its text names
}

func (e *classed) Error() string { return e.err.Error() }
func (e *classed) Unwrap() error { return e.err }

// New makes an error of a class from a format, which may use %w and name options (Key).
func New(c Class, format string, args ...any) error {
	e := &classed{class: c, err: fmt.Errorf(format, args...)}
	for _, a := range args {
		if k, is := a.(Key); is {
			e.keys = append(e.keys, k)
		}
	}
	return e
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
	return &classed{class: c, err: err}
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

// Key is an option of a library's configuration, by the name that configuration files and flags
// give it. Written into a message it reads "option cpu-cache"; the command line turns that into the
// flag (cli.NameFlags), so that a library's text is right for callers that have no flags.
//
//	errs.New(errs.Usage, "%v %d is below %v %d", errs.Key("cpu-cache"), a, errs.Key("batch-size"), b)
type Key string

func (k Key) String() string { return "option " + string(k) }

// Names reports whether an error names an option.
func Names(err error, key Key) bool {
	if c, is := err.(*classed); is && slices.Contains(c.keys, key) {
		return true
	}
	return slices.ContainsFunc(causes(err), func(e error) bool { return Names(e, key) })
}

// causes are the errors that an error wraps.
func causes(err error) []error {
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			return []error{inner}
		}
	case interface{ Unwrap() []error }:
		return e.Unwrap()
	}
	return nil
}

// Flag is the option as heliosctl's command line spells it, for whole commands that a person
// copies. Messages that speak of the option use String.
func (k Key) Flag() string { return "--" + string(k) }

// Closing ends what a function has opened; an error of f is returned through err unless there is
// one already. It is for defer.
func Closing(err *error, f func() error) {
	if cerr := f(); *err == nil {
		*err = cerr
	}
}
