package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/urfave/cli/v2"
)

const (
	// EveryVerb is the group of the flags that every verb has. The program's help explains them; a
	// verb's names them.
	EveryVerb = "Every verb"

	helpWidth  = 100 // columns of the longest line
	helpColumn = 26  // where the texts beside names begin
)

// PrintHelp writes the help of a program, a group of verbs or a verb. It is a cli.HelpPrinter. The
// UsageText of a command is an example, and the Category of a program's one the group of verbs.
func PrintHelp(w io.Writer, _ string, of any) {
	var b strings.Builder
	switch c := of.(type) {
	case *cli.App:
		fmt.Fprintf(&b, "%s\n\nExample: %s\nUsage:   %s VERB [options]; %s VERB %s\n",
			wrap(c.Name+": "+c.Usage, 0, 0), c.UsageText, c.Name, c.Name, FlagName("help"))
		writeVerbs(&b, c.Commands)
		WriteFlags(&b, commonFlags(c.Commands))
		fmt.Fprintf(&b, "\n%s\n", WrapParagraphs(c.Description))
	case *cli.Command:
		fmt.Fprintf(&b, "%s\n\n", wrap(c.HelpName+": "+c.Usage, 0, 0))
		if c.UsageText != "" {
			gap := " "
			if len("Example: "+c.UsageText) > helpWidth { // whole, to be copied
				gap = "\n  "
			}
			fmt.Fprintf(&b, "Example:%s%s\n", gap, c.UsageText)
		}
		if len(c.Subcommands) > 0 {
			fmt.Fprintf(&b, "Usage:   %s VERB [options]\n", c.HelpName)
			writeVerbs(&b, c.Subcommands)
		} else {
			fmt.Fprintf(&b, "Usage:   %s\n", UsageLine(c.HelpName, c))
			every := writeOwnFlags(&b, c)
			if len(every) > 0 {
				program, _, _ := strings.Cut(c.HelpName, " ")
				fmt.Fprintf(&b, "\n%s\n", wrap(fmt.Sprintf("Every verb has %s: see %s %s.",
					strings.Join(every, ", "), program, FlagName("help")), 0, 0))
			}
		}
		if c.Description != "" {
			fmt.Fprintf(&b, "\n%s\n", WrapParagraphs(c.Description))
		}
	}
	_, _ = io.WriteString(w, b.String()) // a reader that has left is no error of help
}

// UsageLine shows the call of a verb.
func UsageLine(name string, c *cli.Command) string {
	if !c.SkipFlagParsing {
		name += " [options]"
	}
	return strings.TrimSpace(name + " " + c.ArgsUsage)
}

// writeOwnFlags writes a verb's flags, and returns the names of those that every verb has.
func writeOwnFlags(b *strings.Builder, c *cli.Command) (every []string) {
	if c.SkipFlagParsing {
		return nil
	}
	var own []cli.Flag
	for _, f := range c.Flags {
		if groupOf(f) == EveryVerb {
			every = append(every, FlagName(f.Names()[0]))
		} else {
			own = append(own, f)
		}
	}
	WriteFlags(b, own)
	return every
}

// writeVerbs lists verbs under the headings of their groups.
func writeVerbs(b *strings.Builder, cmds []*cli.Command) {
	group := "\x00"
	for _, c := range cmds {
		if c.Hidden {
			continue
		}
		if c.Category != group {
			group = c.Category
			heading := "Verbs:"
			if group != "" {
				heading = group + " verbs:"
			}
			fmt.Fprintf(b, "\n%s\n", heading)
		}
		writeEntry(b, c.Name, c.Usage, 15)
	}
}

// WriteFlags lists flags under the headings of their groups, those of no group first.
func WriteFlags(b *strings.Builder, flags []cli.Flag) {
	groups := []string{""}
	for _, f := range flags {
		if g := groupOf(f); !slices.Contains(groups, g) {
			groups = append(groups, g)
		}
	}
	for _, g := range groups {
		heading := g
		if g == "" {
			heading = "Options"
		}
		for _, f := range flags {
			if v, is := f.(cli.VisibleFlag); is && !v.IsVisible() || groupOf(f) != g {
				continue
			}
			if heading != "" {
				fmt.Fprintf(b, "\n%s:\n", heading)
				heading = ""
			}
			name, usage := FlagText(f)
			writeEntry(b, name, usage, helpColumn)
		}
	}
}

func groupOf(f cli.Flag) string {
	if g, is := f.(cli.CategorizableFlag); is {
		return g.GetCategory()
	}
	return ""
}

// FlagText returns how a flag is written, and its help.
func FlagText(f cli.Flag) (name, usage string) {
	name, usage, _ = strings.Cut(cli.FlagStringer(f), "\t")
	return name, strings.TrimSuffix(usage, " (default: false)")
}

// writeEntry writes a name and, from a column on, its text.
func writeEntry(b *strings.Builder, name, text string, column int) {
	line := "  " + name
	if n := utf8.RuneCountInString(line); n+2 <= column {
		line += strings.Repeat(" ", column-n)
	} else {
		b.WriteString(line + "\n")
		line = strings.Repeat(" ", column)
	}
	fmt.Fprintf(b, "%s\n", line+strings.TrimLeft(wrap(text, column, column), " "))
}

// WrapParagraphs wraps a text whose lines are joined, except empty ones and those that begin with a
// space: these are entries of a table.
func WrapParagraphs(text string) string {
	var out, joined []string
	flush := func() {
		if len(joined) > 0 {
			out = append(out, wrap(strings.Join(joined, " "), 0, 0))
		}
		joined = nil
	}
	for line := range strings.SplitSeq(text, "\n") {
		if line != "" && line[0] != ' ' {
			joined = append(joined, line)
			continue
		}
		flush()
		if line != "" {
			column := len(line) - len(strings.TrimLeft(line, " "))
			if i := strings.LastIndex(line, "   "); i > 0 {
				column = utf8.RuneCountInString(line[:i+3])
			} else if i := strings.LastIndex(line, "  "); i > column {
				column = utf8.RuneCountInString(line[:i+2])
			}
			head := []rune(line)[:column]
			line = string(head) + strings.TrimLeft(wrap(string([]rune(line)[column:]), column, column), " ")
		}
		out = append(out, line)
	}
	flush()
	return strings.Join(out, "\n")
}

// wrap breaks a text between words into lines of at most helpWidth columns, indented: the first by
// first columns, the others by rest.
func wrap(text string, first, rest int) string {
	var b strings.Builder
	b.WriteString(strings.Repeat(" ", first))
	column, start := first, true
	for word := range strings.FieldsSeq(text) {
		n := utf8.RuneCountInString(word)
		switch {
		case start:
		case column+1+n > helpWidth:
			b.WriteString("\n" + strings.Repeat(" ", rest))
			column = rest
		default:
			b.WriteString(" ")
			column++
		}
		b.WriteString(word)
		column, start = column+n, false
	}
	return b.String()
}
