package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/dataset/importer"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/options"
	"helios/internal/units"
)

// importCommand has a verb for each format that dataset/importer knows, with the format's options
// as flags.
func importCommand() *cli.Command {
	cmd := &cli.Command{
		Name:  "import",
		Usage: "make a dataset from what is there: edge lists, arrays, and the formats of OGB, IGB, DGL, WebGraph and others",
		Description: "An import that was interrupted, by Ctrl-C, a kill or a power failure, is resumed by the next one with the\n" +
			"same --out, options and input: what it reads, by names, sizes and times. It starts over where these are\n" +
			"others, or with --restart. Until it ends, its files are in a folder beside --out.",
	}
	for _, f := range importer.Formats() {
		var common []string
		for _, o := range options.Of(f.Options()) {
			if o.Common {
				common = append(common, o.Name)
			}
		}
		cmd.Subcommands = append(cmd.Subcommands, &cli.Command{
			Name: f.Name, Usage: f.Usage, Description: options.Expand(f.Description, hcli.FlagName),
			Flags: hcli.TaggedFlags(f.Options()),
			Action: answering(nil, common, action(0, func(ctx context.Context, e *env) error {
				return runImport(ctx, e, f)
			})),
		})
	}
	return cmd
}

func runImport(ctx context.Context, e *env, f *importer.Format) error {
	o := f.Options()
	if err := hcli.ReadTagged(e.c, o); err != nil {
		return err
	}
	out := f.Output(o)
	drafts := f.Drafts(o)
	if out.Out == "" && !drafts {
		return errs.New(errs.Usage, "no {out} DIR to create the dataset in")
	}
	out.Progress, out.Given = e.ui.Progress, e.c.IsSet
	var notes []string
	out.Note = func(t errs.Text) {
		s := t.Spell(e.flag)
		notes = append(notes, s)
		e.ui.DataNote("%s", s)
	}
	found, err := f.Run(ctx, o)
	if err != nil {
		var kept *importer.KeptError
		if errors.As(err, &kept) {
			return whenStopped(err, kept.Where+" are done: the same command goes on there")
		}
		return whenStopped(err, "nothing was kept; run it again")
	}
	if drafts {
		for line := range strings.Lines(found.String()) {
			e.ui.Printf("%s", strings.TrimSuffix(line, "\n"))
		}
		return nil
	}
	if found != nil {
		e.ui.Printf("%s", found)
		if err := e.ui.Event("found", found); err != nil {
			return err
		}
	}
	if err := e.showDataset("imported", out.Out); err != nil {
		return err
	}
	return e.showImport(out.Out, notes)
}

// importLine has the findings of an import.
type importLine struct {
	Counts map[string]int64 `json:"counts"`
	Notes  []string         `json:"notes,omitempty"` // what is not used, chosen or odd
	Peak   int64            `json:"peak_memory_bytes,omitempty"`
}

// showImport shows the counts of edges, and the most memory that the process held.
func (e *env) showImport(out string, notes []string) error {
	d, err := dataset.Open(out)
	if err != nil {
		return err
	}
	counts := d.Meta.Source.Counts
	if err := d.Close(); err != nil {
		return err
	}
	r := importLine{Counts: counts, Notes: notes}
	var text []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		text = append(text, fmt.Sprintf("%d %s", counts[name], name))
	}
	if peak, err := hostmem.PeakRSS(); err == nil {
		r.Peak = peak
		text = append(text, "memory at most "+units.FormatBytes(peak))
	}
	e.ui.Printf("%s", strings.Join(text, ", "))
	return e.ui.Event("import", r)
}
