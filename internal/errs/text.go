package errs

import (
	"fmt"
	"strings"
)

// Key is an option of a library's configuration, by the name that its declaration gives it
// (internal/options).
type Key string

func (k Key) String() string { return "option " + string(k) }

// Flag is the option as heliosctl's command line spells it, for whole commands that a person
// copies.
func (k Key) Flag() string { return "--" + string(k) }

// Keyword is the option as a client of the daemon gives it, and as Python names it.
func (k Key) Keyword() string { return strings.ReplaceAll(string(k), "-", "_") }

// Text is a message that names options by their keys, so that each front end spells them as its
// user knows them: --cpu-cache, cpu_cache. A format names an option as {cpu-cache}, or takes it as
// an argument (Key):
//
//	errs.New(errs.Usage, "{cpu-cache} %d is below %v %d", a, errs.Key(name), b)
type Text string // each key stands between two marks

// mark encloses a key in a marked text. No path and no word of a command line holds a zero byte.
const mark = "\x00"

// Textf makes a text that is no error, such as a note or a part of a message.
func Textf(format string, args ...any) Text {
	if false {
		_ = fmt.Errorf(format, args...) // go vet checks the calls of Textf as those of Errorf
	}
	keyed := make([]any, len(args))
	for i, a := range args {
		switch a := a.(type) {
		case Key:
			keyed[i] = mark + string(a) + mark
		case Text:
			keyed[i] = string(a)
		case error:
			keyed[i] = a
			if t := string(textOf(a)); t != a.Error() {
				keyed[i] = fmt.Errorf("%s", t) //nolint:err113 // for the verb %w
			}
		default:
			keyed[i] = a
		}
	}
	format = Braces(format, func(name string) string { return mark + name + mark })
	return Text(fmt.Errorf(format, keyed...).Error())
}

// String spells keys for callers that have no spelling of their own: "option cpu-cache".
func (t Text) String() string { return t.Spell(Key.String) }

// MarshalText writes the same into JSON.
func (t Text) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// Spell returns the text with the keys that it names as a front end spells them.
func (t Text) Spell(spell func(Key) string) string {
	parts := strings.Split(string(t), mark)
	for i := 1; i < len(parts)-1; i += 2 {
		parts[i] = spell(Key(parts[i]))
	}
	return strings.Join(parts, "")
}

// Spell returns an error's text with the options that it names as a front end spells them.
func Spell(err error, spell func(Key) string) string { return textOf(err).Spell(spell) }

// Names reports whether an error names an option.
func Names(err error, key Key) bool {
	return strings.Contains(string(textOf(err)), mark+string(key)+mark)
}

// textOf returns the text of an error, in which errors that it wraps may name options.
func textOf(err error) Text {
	switch e := err.(type) {
	case *classed:
		return e.text
	case interface{ Text() Text }:
		return e.Text()
	}
	text := err.Error()
	for _, inner := range causes(err) {
		text = strings.Replace(text, inner.Error(), string(textOf(inner)), 1)
	}
	return Text(text)
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

// Braces replaces the names in braces of a text, such as {cpu-cache} and {@modes}, by what f says.
// Other text in braces stays.
func Braces(text string, f func(name string) string) string {
	var b strings.Builder
	for {
		start := strings.IndexByte(text, '{')
		if start < 0 {
			return b.String() + text
		}
		n := strings.IndexByte(text[start:], '}')
		if n < 0 {
			return b.String() + text
		}
		b.WriteString(text[:start])
		name := text[start+1 : start+n]
		if isName(strings.TrimPrefix(name, "@")) {
			b.WriteString(f(name))
			text = text[start+n+1:]
		} else {
			b.WriteByte('{')
			text = text[start+1:]
		}
	}
}

func isName(s string) bool {
	return s != "" && s[0] >= 'a' && s[0] <= 'z' &&
		strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}
