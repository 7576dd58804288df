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
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/units"
)

// importFormat is a format that "import NAME" reads: each has a file of its own that adds it to importFormats.
type importFormat struct {
	name, usage, description string
	flags                    []cli.Flag // beside those of all formats
	run                      func(context.Context, dataset.ImportOptions) error
	// options, where given, reads flags into o.
	options func(e *env, o *dataset.ImportOptions) error
}

var importFormats []importFormat

func importCommand() *cli.Command {
	out := []cli.Flag{
		&cli.StringFlag{Name: "out", Usage: "`DIR` to create"},
		&cli.StringFlag{Name: "name", Usage: "name of the dataset (default: last part of --out)"},
		&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of the splits, and of features that are made up"},
		&cli.Float64Flag{Name: "train-fraction", Value: 0.6, Usage: "share of the labelled nodes to train on, where no splits are given"},
		&cli.Float64Flag{Name: "val-fraction", Value: 0.2, Usage: "share of them to validate on; the rest is for the test"},
		&cli.BoolFlag{Name: "no-edges", Usage: "drop all edges"},
		&cli.StringFlag{Name: "feature-dtype", DefaultText: "float16 where the source is, or else float32", Usage: "`TYPE` of the dataset's own features: float32 or float16"},
	}
	files := append([]cli.Flag{
		&cli.StringFlag{Name: "in", Usage: "`PATH` to read: a folder, archive or file"},
		&cli.StringFlag{Name: "features", Usage: "`FILE` of features, where it is not found in --in"},
		&cli.StringFlag{Name: "labels", Usage: "`FILE` of labels, where it is not found in --in"},
		&cli.StringFlag{Name: "splits", Usage: "`DIR` with train, val (or valid) and test, where it is not found in --in"},
		&cli.Int64Flag{Name: "nodes", DefaultText: "found in the input", Usage: "number of nodes"},
		&cli.BoolFlag{Name: "make-splits", Usage: "deal new splits in place of the input's own"},
		&cli.StringFlag{Name: "split-index", DefaultText: "the only one", Usage: "`NUMBER` of the split, from 0, where masks hold several"},
		&cli.BoolFlag{Name: "unlabelled-ok", Usage: "take nodes without a label (NaN or -1) as unlabelled, out of the splits"},
		&cli.BoolFlag{Name: "undirected", Aliases: []string{"reverse"}, Usage: "store each edge both ways, and drop repeated edges"},
		&cli.BoolFlag{Name: "add-reverse", Usage: "add the opposite of each edge that is no self loop; repeated edges stay, unless --dedup"},
		oneOf("self-loops", "edges from a node to itself: keep those that are there, drop them, or add one to each node, in place of what is there", "keep", []string{"keep", "drop", "add"}, nil),
		&cli.BoolFlag{Name: "dedup", Usage: "drop repeated edges"},
		&cli.StringFlag{Name: "feature-fn", Usage: "`FN`, \"hash\" or \"hash:SEED\", computes the features (--dim many) from the node's number; none are stored"},
		&cli.StringFlag{Name: "memory", DefaultText: "half of what is available, at most 2GiB", Usage: "`SIZE` that the import may take; sorted parts of the edges lie beside --out meanwhile"},
		&cli.BoolFlag{Name: "restart", Usage: "start over, not where an interrupted import was"},
	}, out...)
	cmd := &cli.Command{
		Name:  "import",
		Usage: "make a dataset from what is there: edge lists, arrays, and the formats of OGB, IGB, DGL, WebGraph and others",
		Description: "An import that was interrupted, by Ctrl-C, a kill or a power failure, is gone on with by the next one with the\n" +
			"same --out, options and input: what it reads, by names, sizes and times. It starts over where these are\n" +
			"others, or with --restart. Until it ends, its files are in a folder beside --out.",
		Subcommands: []*cli.Command{
			{
				Name:  "debian",
				Usage: "packages as nodes, dependencies as edges, sections as labels, words of descriptions as features",
				Flags: append([]cli.Flag{
					&cli.StringFlag{Name: "in", DefaultText: "the package lists of this machine", Usage: "package indexes `PATH[,PATH…]`: Packages files, plain, .gz, .lz4 or .xz, or folders of them"},
					&cli.IntFlag{Name: "dim", DefaultText: "256", Usage: "words that become features"},
					&cli.BoolFlag{Name: "long-descriptions", Usage: "also take the words of the long descriptions"},
					&cli.BoolFlag{Name: "one-way", Usage: "keep only the edges from a package to those that need it"},
				}, out...),
				Action: action(0, runImportDebian),
			},
			{
				Name:        "npy",
				Usage:       "NumPy arrays: features, labels and edges, in a folder or .npz archive",
				Description: importNPYHelp,
				Flags:       append([]cli.Flag{mapFlag()}, files...),
				Action:      action(0, func(ctx context.Context, e *env) error { return runImport(ctx, e, dataset.ImportNPY) }),
			},
			{
				Name:        "edges",
				Usage:       "edge lists: CSV or TSV files of source and destination",
				Description: importEdgesHelp,
				Flags: append([]cli.Flag{&cli.IntFlag{Name: "dim", DefaultText: "64", Usage: "features to make up where there are none"},
					&cli.BoolFlag{Name: "ignore-columns", Usage: "take the first two columns of an edge list with more, such as weights"}}, files...),
				Action: action(0, func(ctx context.Context, e *env) error { return runImport(ctx, e, dataset.ImportEdges) }),
			},
		},
	}
	for _, f := range importFormats {
		cmd.Subcommands = append(cmd.Subcommands, &cli.Command{
			Name: f.name, Usage: f.usage, Description: f.description, Flags: append(f.flags, files...),
			Action: action(0, func(ctx context.Context, e *env) error {
				return runImport(ctx, e, func(ctx context.Context, o dataset.ImportOptions) error {
					if f.options != nil {
						if err := f.options(e, &o); err != nil {
							return err
						}
					}
					return f.run(ctx, o)
				})
			}),
		})
	}
	return cmd
}

const (
	importNPYHelp = "Arrays are found by their names: edge_index (2 × edges), features (nodes × dim), labels (nodes),\n" +
		"and train, val and test where the splits are given: ids, or masks, also several of them (10 × nodes; --split-index).\n" +
		"--map gives other names, as in --map my_ids=train. Arrays that are not used are named."
	importEdgesHelp = "One edge a line, source first, split by commas, semicolons, tabs or spaces, plain or .gz (further\n" +
		"columns are refused, or left out with --ignore-columns); or a\n" +
		"folder with edges and, where there are some, features, labels and splits (OGB's raw folder)."
)

func (e *env) importOut() (string, error) {
	out := e.c.String("out")
	if out == "" {
		return "", errs.New(errs.Usage, "no --out DIR to create the dataset in")
	}
	return out, e.notZero("nodes", "dim")
}

func runImport(ctx context.Context, e *env, f func(context.Context, dataset.ImportOptions) error) error {
	out, err := e.importOut()
	if err != nil {
		return err
	}
	c := e.c
	memory, err := e.importMemory()
	if err != nil {
		return err
	}
	o := dataset.ImportOptions{
		In: c.String("in"), Out: out, Name: c.String("name"), Features: c.String("features"), Labels: c.String("labels"), SplitDir: c.String("splits"),
		Nodes: c.Int64("nodes"), UnlabelledOK: c.Bool("unlabelled-ok"), Undirected: c.Bool("undirected"), AddReverse: c.Bool("add-reverse"), SelfLoops: c.String("self-loops"), Dedup: c.Bool("dedup"), NoEdges: c.Bool("no-edges"),
		Dim: c.Int("dim"), Seed: c.Uint64("seed"), TrainFraction: c.Float64("train-fraction"), ValFraction: c.Float64("val-fraction"), Progress: e.ui.Progress,
		FeatureDType: c.String("feature-dtype"), FeatureFn: c.String("feature-fn"),
		MakeSplits: c.Bool("make-splits"), SplitIndex: c.String("split-index"), IgnoreColumns: c.Bool("ignore-columns"), AllowOutside: c.Bool("allow-outside"),
		Memory: memory, Restart: c.Bool("restart"), Note: func(s string) { e.ui.Note("%s", s) },
	}
	if o.Map, err = mapped(c.String("map")); err != nil {
		return err
	}
	if err := f(ctx, o); err != nil {
		var kept *dataset.KeptError
		if errors.As(err, &kept) {
			return whenStopped(err, kept.Where+" are done: the same command goes on there")
		}
		return whenStopped(err, "nothing was kept; run it again")
	}
	if err := e.showDataset("imported", out); err != nil {
		return err
	}
	return e.showImport(out)
}

// mapFlag names the input's arrays.
func mapFlag() cli.Flag {
	return &cli.StringFlag{Name: "map", Usage: "`THEIRS=OURS[,…]`: names of the input's arrays; ours are " + strings.Join(dataset.ArrayNames, ", ")}
}

// mapped reads --map: the input's name by ours.
func mapped(text string) (map[string]string, error) {
	if text == "" {
		return nil, nil
	}
	pairs, err := list("map", text)
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, p := range pairs {
		theirs, ours, _ := strings.Cut(p, "=")
		if theirs == "" || !slices.Contains(dataset.ArrayNames, ours) {
			return nil, errs.New(errs.Usage, "--map %q: give THEIRS=OURS, where ours is one of %s", p, strings.Join(dataset.ArrayNames, ", "))
		}
		if out[ours] != "" {
			return nil, errs.New(errs.Usage, "--map: %s and %s are both to be %s; keep one", out[ours], theirs, ours)
		}
		out[ours] = theirs
	}
	return out, nil
}

// importMemory reads --memory; 0 leaves it to the import.
func (e *env) importMemory() (int64, error) {
	if !e.c.IsSet("memory") {
		return 0, nil
	}
	m, err := units.ParseBytes(e.c.String("memory"))
	if err != nil {
		return 0, errs.New(errs.Usage, "--memory: %w", err)
	}
	if m < 64<<20 {
		return 0, errs.New(errs.Usage, "--memory %s is too little to import in; give at least 64MiB", e.c.String("memory"))
	}
	return m, nil
}

// showImport tells what became of the edges, and the most memory that the process held.
func (e *env) showImport(out string) error {
	d, err := dataset.Open(out)
	if err != nil {
		return err
	}
	counts := d.Meta.Source.Counts
	if err := d.Close(); err != nil {
		return err
	}
	r := map[string]any{"counts": counts}
	var text []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		text = append(text, fmt.Sprintf("%d %s", counts[name], name))
	}
	if peak, err := hostmem.PeakRSS(); err == nil {
		r["peak_memory_bytes"] = peak
		text = append(text, "memory at most "+units.FormatBytes(peak))
	}
	e.ui.Printf("%s", strings.Join(text, ", "))
	return e.ui.Event("import", r)
}

func runImportDebian(ctx context.Context, e *env) error {
	out, err := e.importOut()
	if err != nil {
		return err
	}
	c := e.c
	in, err := list("in", c.String("in"))
	if err != nil {
		return err
	}
	r, err := dataset.ImportDebian(ctx, dataset.DebianOptions{
		In: in, Out: out, Name: c.String("name"), Dim: c.Int("dim"), LongDescriptions: c.Bool("long-descriptions"), OneWay: c.Bool("one-way"), NoEdges: c.Bool("no-edges"),
		Seed: c.Uint64("seed"), TrainFraction: c.Float64("train-fraction"), ValFraction: c.Float64("val-fraction"), Progress: e.ui.Progress,
		FeatureDType: c.String("feature-dtype"),
	})
	if err != nil {
		return whenStopped(err, "nothing was kept; run it again")
	}
	e.ui.Printf("%d packages, %d dependencies, %d sections, %d words, from %s", r.Packages, r.Dependencies, r.Sections, r.Words, strings.Join(r.From, ", "))
	if err := e.ui.Event("found", r); err != nil {
		return err
	}
	return e.showDataset("imported", out)
}
