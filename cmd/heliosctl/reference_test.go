package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"
)

const referenceFile = "docs/CLI.md"

// writeReference writes all verbs with their options, as help has them.
func writeReference(app *cli.App) string {
	var b strings.Builder
	b.WriteString(`# Verbs and options

Every verb of heliosctl with its options, as ` + "`--help`" + ` has them. ` + "`make generate`" + ` writes
this page. Options go before or behind arguments, as ` + "`--name value`" + ` or ` + "`--name=value`" + `. With
` + "`--json`" + ` a verb writes lines that [results.schema.json](results.schema.json) describes; those of
each verb are named below.

`)
	for path, c := range verbs(app.Commands, "") {
		if !c.Hidden {
			fmt.Fprintf(&b, "- [%s](#heliosctl-%s): %s\n", path, strings.ReplaceAll(path, " ", "-"),
				escapeMarkdown(c.Usage))
		}
	}
	for path, c := range verbs(app.Commands, "") {
		if c.Hidden {
			continue
		}
		fmt.Fprintf(&b, "\n## heliosctl %s\n\n", path)
		text := strings.TrimSpace("heliosctl " + path + " [options] " + c.ArgsUsage)
		if c.SkipFlagParsing {
			text = strings.TrimSpace("heliosctl " + path + " " + c.ArgsUsage)
		}
		fmt.Fprintf(&b, "```text\n%s\n\n%s\n", text, c.Usage)
		if c.Description != "" {
			fmt.Fprintf(&b, "\n%s\n", c.Description)
		}
		if options := optionsText(c); options != "" && !c.SkipFlagParsing {
			b.WriteString("\n" + options)
		}
		b.WriteString("```\n")
		if events := eventsOf(path); len(events) > 0 {
			fmt.Fprintf(&b, "\nLines of JSON: %s.\n", strings.Join(events, ", "))
		}
	}
	return b.String()
}

func escapeMarkdown(s string) string {
	return strings.NewReplacer("<", "&lt;", "*", "\\*", "_", "\\_").Replace(s)
}

// optionsText lists a verb's options by their groups.
func optionsText(c *cli.Command) string {
	var b strings.Builder
	groups := map[string][][2]string{}
	var names []string
	for _, f := range c.Flags {
		if v, is := f.(cli.VisibleFlag); is && !v.IsVisible() {
			continue
		}
		group := ""
		if g, is := f.(cli.CategorizableFlag); is {
			group = g.GetCategory()
		}
		if !slices.Contains(names, group) {
			names = append(names, group)
		}
		name, usage, _ := strings.Cut(cli.FlagStringer(f), "\t")
		groups[group] = append(groups[group], [2]string{name, usage})
	}
	slices.Sort(names)
	for _, n := range names {
		if n != "" {
			fmt.Fprintf(&b, "\n%s:\n", n)
		}
		for _, o := range groups[n] {
			fmt.Fprintf(&b, "  %s\n      %s\n", o[0], o[1])
		}
	}
	return b.String()
}

// eventsOf names the lines that a verb writes.
func eventsOf(path string) (names []string) {
	for _, v := range verbEvents {
		n := "`" + v.event + "`"
		if v.verb != "" && strings.HasPrefix(path+" ", v.verb+" ") && !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return names
}

func TestReferenceDocsAreCurrent(t *testing.T) {
	text := writeReference(newApp(io.Discard, io.Discard))
	holdDocument(t, referenceFile, text)
	for _, want := range []string{"## heliosctl bench io", "--wide", "Lines of JSON: `epoch`"} {
		require.Contains(t, text, want)
	}
}
