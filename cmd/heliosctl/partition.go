package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/graph"
	"helios/graph/partition"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/units"
	"helios/sched/plan"
)

func partitionCommand() *cli.Command {
	var methods strings.Builder
	for _, name := range partition.MethodNames() {
		fmt.Fprintf(&methods, "\n%-7s %s", name, partition.Summary(name))
	}
	return verb(&cli.Command{
		Name:      "partition",
		Usage:     "divide a dataset's nodes into parts with few edges between them",
		ArgsUsage: "[DATASET]",
		Description: "Prints how many edges are cut and how even the parts are, and keeps the parts in --out. auto is metis where its library\n" +
			"is installed and the graph fits into memory, else stream." + methods.String(),
	}, 1, hcli.Of[partitionArgs]().Without("results"), runPartition)
}

// partitionArgs holds the options of partition.
type partitionArgs struct {
	datasetArgs
	outputs
	o        partition.Options `options:"in"`
	topology string            `option:"topology" oneof:"@topologies" default:"memory" usage:"where the edges are meanwhile, the CPU's memory or their file"`
	in       string            `option:"in" arg:"FILE" usage:"check and measure the partition in FILE; none is made"`
	out      string            `option:"out" arg:"FILE" usage:"FILE to write; in the dataset's folder and named *.partition, verify checks it too (default: nothing is kept)"`
}

// check refuses what cannot be, before anything is opened.
func (a *partitionArgs) check(e *env) error {
	switch {
	case a.in != "" && a.out != "":
		return errs.New(errs.Usage, "{in} measures a partition that is there and {out} makes one; give one of them")
	case a.in != "":
		if f := e.given(&a.o.Parts, &a.o.Method, &a.o.Balance, &a.o.Passes, &a.o.Seed,
			&a.o.Library); f != "" {
			return errs.New(errs.Usage, "%v: the partition of {in} has its own; leave it out", errs.Key(f))
		}
	case e.given(&a.o.Parts) == "":
		return errs.New(errs.Usage, "no {parts} NUMBER; say how many parts there are to be")
	}
	return nil
}

// partitionResult has the figures of a partition.
type partitionResult struct {
	partition.Info
	Name    string  `json:"dataset_name"`
	File    string  `json:"file,omitempty"`
	Seconds float64 `json:"seconds"` // without the opening of the topology
	// Peak is the most memory of the process, the page cache aside; Before is that once the
	// topology was open.
	Peak     int64    `json:"peak_bytes"`
	Before   int64    `json:"before_bytes"`
	Topology string   `json:"topology"`
	Notes    []string `json:"notes,omitempty"`
}

func runPartition(ctx context.Context, e *env, a *partitionArgs) (err error) {
	if err := a.check(e); err != nil {
		return err
	}
	out, err := a.create("out", a.out)
	if err != nil {
		return err
	}
	defer closing(&err, out.Discard)
	d, err := a.open(e)
	if err != nil {
		return err
	}
	defer closing(&err, d.Close)
	t, err := a.openTopology(ctx, d)
	if err != nil {
		return err
	}
	if t.OnStorage() {
		defer closing(&err, t.Close)
	}
	r := partitionResult{Name: d.Meta.Name, Topology: a.topology}
	if rss, err := hostmem.ReadRSS(); err == nil {
		r.Before = rss.Counted()
	}
	meter := hostmem.StartPeakMeter(10 * time.Millisecond)
	defer meter.Stop()
	start := time.Now()
	a.o.Progress = e.ui.Progress
	p, err := a.partition(ctx, d, t)
	if err != nil {
		return whenStopped(err, "nothing was kept; run it again")
	}
	defer closing(&err, p.Close)
	r.Seconds = time.Since(start).Seconds()
	r.File = a.in
	if out != nil {
		if err := out.Commit(p.Write(out)); err != nil {
			return err
		}
		r.File = out.Path()
	}
	r.Info, r.Peak, r.Notes = p.Info, meter.Peak(), p.Notes
	return showPartition(e, &r)
}

// openTopology opens the edges, in memory or in their file.
func (a *partitionArgs) openTopology(ctx context.Context, d *dataset.Dataset) (*graph.Topology,
	error) {
	if a.topology == plan.TopologySSD {
		return d.TopologyOnSSD(ctx, graph.OutOfCoreOptions{})
	}
	return d.Topology() // the dataset closes it
}

// partition makes a partition, or reads one.
func (a *partitionArgs) partition(ctx context.Context, d *dataset.Dataset,
	t *graph.Topology) (p *partition.Partition, err error) {
	if a.in == "" {
		p, err = partition.Make(ctx, t, a.o)
		if err == nil {
			p.Info.Dataset = d.Meta.UUID
		}
		return p, err
	}
	if p, err = partition.Open(a.in); err != nil {
		return nil, err
	}
	stats := p.Info.Stats
	if err = p.BelongsTo(d.Meta.UUID, d.Meta.Nodes, d.Meta.Edges); err != nil {
		err = fmt.Errorf("%s: %w", a.in, err)
	} else {
		p.Info.Stats, err = p.Measure(ctx, t, a.o.Progress)
	}
	if err == nil && p.Info.Stats != stats {
		err = errs.New(errs.Device,
			"%s says that it cuts %d edges, it cuts %d: it was not made of this dataset's edges; partition the dataset again",
			a.in, stats.CutEdges, p.Info.CutEdges)
	}
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

func showPartition(e *env, r *partitionResult) error {
	for _, n := range r.Notes {
		e.plainNote(n)
	}
	how := r.Method
	if r.Library != "" {
		how += " (" + r.Library + ")"
	}
	if r.Start != "" {
		how += fmt.Sprintf(", %s start, %d passes over the edges", r.Start, r.EdgePasses)
	}
	rows := [][]string{
		{"partition", fmt.Sprintf("%s: %d nodes and %d edges in %d parts", r.Name, r.Nodes, r.Edges,
			r.Parts)},
		{"method", fmt.Sprintf("%s; seed %d", how, r.Seed)},
		{"cut", fmt.Sprintf("%d edges, %.2f%%", r.CutEdges, 100*r.CutShare)},
		{"nodes, max / mean", fmt.Sprintf("%.3f (most: %d; asked for: %.3f)", r.NodeBalance,
			r.MaxNodes, r.Balance)},
		{"in-edges, max / mean", fmt.Sprintf("%.3f (most: %d)", r.EdgeBalance, r.MaxEdges)},
		{"time", fmt.Sprintf("%.2f s", r.Seconds)},
		{"peak memory", fmt.Sprintf("%s, %s of it before", units.FormatBytes(r.Peak),
			units.FormatBytes(r.Before))},
	}
	if r.EmptyParts > 0 {
		rows = append(rows, []string{"empty parts", fmt.Sprint(r.EmptyParts)})
	}
	if r.File != "" {
		rows = append(rows, []string{"file", r.File})
	}
	e.ui.Facts(rows)
	return e.ui.Event("result", r)
}

// partitionReport has the findings of verify on a partition in a dataset's folder.
type partitionReport struct {
	File  string `json:"file"`
	Parts int    `json:"parts"`
	Bytes int64  `json:"bytes"`
}

// verifyPartitions reads the partitions in a dataset's folder.
func (v *verifier) verifyPartitions(d *dataset.Dataset) error {
	files, err := partition.Files(d.Dir())
	if err != nil {
		return err
	}
	var all []error
	for _, path := range files {
		p, err := partition.Open(path)
		if err != nil {
			all = append(all, err)
			continue
		}
		r := partitionReport{filepath.Base(path), p.Info.Parts, 4 * p.Info.Nodes}
		err = p.BelongsTo(d.Meta.UUID, d.Meta.Nodes, d.Meta.Edges)
		if err = errors.Join(err, p.Close()); err != nil {
			all = append(all, fmt.Errorf("%s: %w", path, err))
			continue
		}
		v.ui.Printf("%s: %s (%d parts) is good by its checksums", d.Meta.Name, r.File, r.Parts)
		if err := v.ui.Event("partition", r); err != nil {
			return err
		}
	}
	return errors.Join(all...)
}
