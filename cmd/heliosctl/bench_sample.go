package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/cuda"
	"helios/dataset"
	"helios/graph"
	"helios/internal/bench/sample"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/simd"
	"helios/internal/units"
	"helios/sched/plan"
)

func benchSampleCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "sample",
		Usage:     "neighbour sampling: edges a second, audited",
		ArgsUsage: "[DATASET]",
		Description: "Samples mini-batches and does nothing with them. Needs no SSDs. Without a dataset the graph is made in\n" +
			"memory: even (nodes of about the same degree) or skewed (the degrees of R-MAT; the number of nodes is\n" +
			"rounded up to a power of two).\n" +
			"Lists of --workers and --kernels give a row for each combination on the host device, and each GPU of\n" +
			"--device one more (it reads the topology in CPU memory). They take turns: each samples the same\n" +
			"--batches mini-batches, --turns times; a rate is the median over the turns, with its range.\n" +
			"After that each row's audit samples some batches again and compares them with the topology (edges\n" +
			"there, none drawn twice, as many as degree and fanout allow); all rows must give the same bytes.\n" +
			"\"distinct\" is the new nodes over the edges, \"busy\" the share of the time in which kernels ran.\n" +
			"With ssd in --topology each row comes with the neighbour lists left in the dataset's file, too, through a cache of lists\n" +
			"(--neighbor-cache): \"from memory\" is the share of the edges that it had, \"read\" what a mini-batch read. The audit has\n" +
			"the topology in memory all the same.",
	}, 1, hcli.Of[sampleBenchArgs]().
		Says("dataset", "sample the topology of this dataset `DIR` from its training nodes; may also be given as an argument").
		Says("seed", "seed of the graph, of the batches and of the draws"), runBenchSample)
}

// sampleBenchArgs holds the options of "bench sample".
type sampleBenchArgs struct {
	datasetArgs
	kernelBenchArgs
	cfg        sample.Config `options:"in"`
	inAll      float64       `option:"seconds" shown:"by {batches}" usage:"instead, about how long a row samples in all its turns"`
	fanouts    []int         `option:"fanout" ints:"-1" default:"15,10,5" arg:"F1,F2,…" usage:"neighbours sampled per hop F1,F2,…, the seeds' first; -1 takes all"`
	degrees    bool          `option:"degrees" use:"setting" usage:"look up the degrees of all nodes too, as GCN needs them"`
	graph      string        `option:"graph" use:"setting" oneof:"even,skewed" default:"even" usage:"without a dataset"`
	nodes      int64         `option:"nodes" default:"1000000" usage:"its nodes"`
	degree     float64       `option:"avg-degree" default:"15" usage:"its mean number of in-neighbours"`
	slots      []int         `option:"workers" shown:"1 and one per CPU" arg:"N[,N…]" usage:"worker slots of the host device N[,N…]"`
	levels     []simd.Level  `option:"kernels" offers:"@levels" default:"auto" arg:"LEVEL[,LEVEL…]" usage:"instructions LEVEL[,LEVEL…]: {@levels}"`
	topologies []string      `option:"topology" use:"setting" offers:"@topologies" default:"memory" arg:"WHERE[,WHERE]" usage:"where a dataset's neighbour lists are, WHERE[,WHERE]: {@topologies}"`
	lists      units.Budget  `option:"neighbor-cache" shown:"10% with {topology} ssd" arg:"BUDGET" usage:"BUDGET of CPU memory for the lists of hot nodes, a size or a share of the topology"` // of a topology on storage
}

// SetOption reads lists of places, workers and levels of kernels.
func (a *sampleBenchArgs) SetOption(name, text string) (done bool, err error) {
	switch name {
	case "topology":
		a.topologies, err = parseList(name, text, "places", parseChoice(name, plan.Topologies))
	case "workers":
		a.slots, err = parseSlotRanges(text)
	case "kernels":
		a.levels, err = parseList(name, text, "levels", simd.Parse)
	default:
		return a.kernelBenchArgs.SetOption(name, text)
	}
	return true, err
}

func parseSlotRanges(text string) ([]int, error) {
	slots, err := parseNumbers("workers", text)
	if err != nil {
		return nil, err
	}
	if n := slices.Max(slots); n > 4096 {
		return nil, errs.New(errs.Usage, "{workers} %d is not between 1 and 4096", n)
	}
	return slots, nil
}

// check completes the configuration and refuses what cannot be.
func (a *sampleBenchArgs) check(e *env) error {
	if err := a.refuseHostOnly(e, &a.slots, &a.levels); err != nil {
		return err
	}
	a.cfg.Sampler.Fanouts, a.cfg.Sampler.Degrees, a.cfg.Seconds = a.fanouts, a.degrees, a.inAll
	if e.given(&a.inAll) != "" {
		if e.given(&a.cfg.Batches) != "" {
			return errs.New(errs.Usage, "{batches} and {seconds}: give one of them")
		}
		if a.cfg.Seconds == 0 {
			return errs.New(errs.Usage, "{seconds} 0: give a length above 0, or leave it out")
		}
	}
	a.cfg.Sampler.Seed = a.seed
	if err := a.cfg.Check(); err != nil {
		return err
	}
	switch ssd := slices.Contains(a.topologies, plan.TopologySSD); {
	case ssd && !a.named(e):
		return errs.New(errs.Usage,
			"{topology} %s: a graph made in memory has no file; give a dataset, or leave it out",
			plan.TopologySSD)
	case !ssd && e.given(&a.lists) != "":
		return errs.New(errs.Usage,
			"{neighbor-cache}: all of the topology is in memory; leave it out, or add {topology} %s",
			plan.TopologySSD)
	}
	if f := e.given(&a.graph, &a.nodes, &a.degree); f != "" && a.named(e) {
		return errs.New(errs.Usage,
			"%v is for a graph made in memory; leave it out, or the dataset", errs.Key(f))
	}
	if e.given(&a.lists) == "" {
		a.lists = units.Budget{Percent: 10}
	}
	if len(a.slots) == 0 {
		a.slots = usualSlots()
	}
	return nil
}

// topology returns the graph to sample and the nodes to start from.
func (a *sampleBenchArgs) topology(e *env) (t *graph.Topology, seeds []int64, name string,
	d *dataset.Dataset, done func() error, err error) {
	if a.named(e) {
		if d, err = a.datasetArgs.open(e); err != nil {
			return nil, nil, "", nil, nil, err
		}
		if t, err = d.Topology(); err == nil {
			seeds, err = d.Split("train")
		}
		if err != nil {
			return nil, nil, "", nil, nil, errors.Join(err, d.Close())
		}
		name, done = d.Meta.Name, d.Close
		if len(seeds) > 0 {
			return t, seeds, name, d, done, nil
		}
	} else {
		name = a.graph
		if t, err = graph.Synthetic(a.nodes, a.degree, name == "skewed", a.seed); err != nil {
			return nil, nil, "", nil, nil, err
		}
		done = t.Close
	}
	// all of them, or enough that are spread over the graph
	seeds = make([]int64, min(t.NumNodes, 1<<22))
	step := t.NumNodes / int64(len(seeds))
	for i := range seeds {
		seeds[i] = int64(i) * step
	}
	return t, seeds, name, d, done, nil
}

func runBenchSample(ctx context.Context, e *env, a *sampleBenchArgs) (err error) {
	if err := a.check(e); err != nil {
		return err
	}
	out, err := a.openResults(e)
	if err != nil {
		return err
	}
	defer out.end(&err)
	t, seeds, name, d, done, err := a.topology(e)
	if err != nil {
		return err
	}
	defer closing(&err, done)
	where := map[string]*graph.Topology{plan.TopologyMemory: t}
	if slices.Contains(a.topologies, plan.TopologySSD) {
		far, err := a.topologyOnSSD(ctx, d)
		if err != nil {
			return err
		}
		defer closing(&err, far.Close)
		where[plan.TopologySSD] = far
	}
	var sources []sample.Source
	defer closing(&err, func() (err error) {
		for _, s := range slices.Backward(sources) {
			closing(&err, s.Device.Close)
		}
		return err
	})
	if sources, err = a.openSources(where); err != nil {
		return err
	}
	a.cfg.Graph = name
	a.cfg.Progress = func(done, of int) { e.ui.Progress("bench sample", int64(done), int64(of)) }
	rows, err := sample.Measure(ctx, a.cfg, sources, seeds, t)
	if err != nil {
		return whenStopped(err,
			"the rows are incomplete: run it again, with fewer --turns or --batches")
	}
	for _, r := range rows {
		out.event("row", r)
	}
	e.ui.Printf(
		"%s: %d nodes, %d edges, topology of %s; fanout %s, %d seeds, %d turns of %d batches", name,
		t.NumNodes, t.NumEdges, units.FormatBytes(t.Bytes()),
		intsText(a.cfg.Sampler.Fanouts), rows[0].BatchSize, a.cfg.Turns, rows[0].Batches)
	if far := where[plan.TopologySSD]; far != nil {
		i := far.StorageInfo()
		e.ui.Printf("on storage: in memory offsets of %s and %d lists of hot nodes in %s",
			units.FormatBytes(i.OffsetBytes), i.CacheLists, units.FormatBytes(i.CacheBytes))
	}
	failed := showSampleBench(e, rows)
	return auditFailed(failed, len(rows))
}

// topologyOnSSD opens a dataset's topology with its lists left on storage.
func (a *sampleBenchArgs) topologyOnSSD(ctx context.Context, d *dataset.Dataset) (*graph.Topology,
	error) {
	bytes, err := d.TopologyBytes()
	if err != nil {
		return nil, err
	}
	cache := a.lists.Of(bytes)
	if a.lists.Percent != 0 && cache < graph.LeastNeighborCache(d.Meta.Nodes) {
		cache = 0 // as in training
	}
	return d.TopologyOnSSD(ctx, graph.OutOfCoreOptions{CacheBytes: cache})
}

// openSources opens a device for each row. Those that come with an error are open, too.
func (a *sampleBenchArgs) openSources(where map[string]*graph.Topology) (all []sample.Source,
	err error) {
	add := func(topology string, dev cuda.Device, err error) error {
		if err == nil {
			all = append(all, sample.Source{Device: dev, Topology: where[topology],
				Place: topology})
		}
		return err
	}
	for _, d := range a.devices {
		for _, topology := range a.topologies {
			if d != "host" {
				dev, err := openGPU(d)
				if err := add(topology, dev, err); err != nil {
					return all, err
				}
				continue
			}
			for _, level := range a.levels {
				for _, workers := range a.slots {
					dev, err := openHost(workers, level)
					if err := add(topology, dev, err); err != nil {
						return all, err
					}
				}
			}
		}
	}
	return all, nil
}

// showSampleBench shows the rows, and returns how many failed their audit.
func showSampleBench(e *env, rows []sample.Row) (failed int) {
	var table [][]string
	for _, r := range rows {
		audit := "passed"
		if !r.Audited {
			failed++
			audit = "FAILED: " + r.AuditError
		}
		own := int64(0)
		for purpose, n := range r.Memory {
			if !strings.HasPrefix(purpose, "topology") {
				own += n
			}
		}
		code := r.Kernels
		if r.Code != "" {
			code = codeName(r.Code)
		}
		cached, read := "", ""
		if s := r.Reads; s != nil {
			cached = share100(float64(s.CachedEdges) / float64(max(s.Edges, 1)))
			read = units.FormatBytes(s.Bytes / max(r.Sampled, 1))
		}
		table = append(table, []string{
			r.Device, code, strconv.Itoa(r.Workers), units.FormatCount(r.Rate),
			units.FormatCount(r.Min) + "-" + units.FormatCount(r.Max),
			units.FormatCount(r.NodeRate), units.FormatSeconds(r.NSPerEdge / 1e9),
			units.FormatSeconds(r.CPUPerEdge / 1e9), share100(r.Busy),
			units.FormatCount(r.PerBatch), fmt.Sprintf("%.2f", r.Distinct), units.FormatBytes(own),
			r.Topology, cached, read, audit,
		})
	}
	e.ui.Columns(sampleColumns, table)
	return failed
}

// intsText is a list of numbers as a flag takes it.
func intsText(v []int) string {
	parts := make([]string, len(v))
	for i, n := range v {
		parts[i] = strconv.Itoa(n)
	}
	return strings.Join(parts, ",")
}
